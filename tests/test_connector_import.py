"""A pod that we were injected into must start whatever is wrong with us."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

SHOW = """
import logging
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)
from py_kvcache.connector import PyKvCacheConnector as C
print("CLASS", C.__module__, C.__name__)
"""
BUILD = (
    SHOW
    + """
from types import SimpleNamespace as N
extra = {"root": "/cache", **EXTRA}
try:
    print("BUILT", type(C(N(kv_transfer_config=N(kv_connector_extra_config=extra)), None, None)).__name__)
except Exception as error:
    print("ERROR", type(error).__name__, error)
"""
)
# For the inert connector to be built on in the stand-in.
ROLE = """
V1 = sys.modules[KV]
V1.KVConnectorRole.SCHEDULER = "scheduler"
V1.KVConnectorBase_V1.__init__ = lambda self, *args: None
"""


def test_the_connector_imports_without_liburing_and_is_whole(run_python):
    out = run_python(SHOW, blocked=("liburing",))
    assert "CLASS py_kvcache.active PyKvCacheConnector" in out
    assert "LOG" not in out


def test_importing_the_connector_loads_neither_liburing_nor_a_command_line_library(run_python):
    out = run_python(SHOW + "print('EXTRA', sorted({'liburing', 'rich', 'typer'} & set(sys.modules)))")
    assert "EXTRA []" in out


@pytest.mark.parametrize("missing", ["blake3", "pydantic", "numpy"])
def test_without_a_library_that_it_needs_the_import_warns_and_building_says_which(run_python, missing: str):
    out = run_python("EXTRA = {}\n" + ROLE + BUILD, blocked=(missing,))
    assert f"LOG py-kvcache cannot be used here and stays off: ImportError: {missing}" in out
    assert "ERROR RuntimeError py-kvcache could not be imported" in out
    assert f"{missing}" in out.split("ERROR")[1]


@pytest.mark.parametrize("by", ["extra config", "environment"])
def test_a_connector_that_cannot_be_imported_serves_without_a_cache_if_asked_to(run_python, by: str):
    extra, env = {}, {}
    if by == "environment":
        env = {"PY_KVCACHE_ON_UNSUPPORTED": "disable"}
    else:
        extra = {"on_unsupported": "disable"}
    out = run_python(f"EXTRA = {extra}\n" + ROLE + BUILD, blocked=("blake3",), env=env)
    assert "BUILT UnavailableConnector" in out


def test_the_users_word_is_stronger_than_the_environments_there_too(run_python):
    out = run_python(
        "EXTRA = {'on_unsupported': 'fail'}\n" + ROLE + BUILD,
        blocked=("blake3",),
        env={"PY_KVCACHE_ON_UNSUPPORTED": "disable"},
    )
    assert "ERROR RuntimeError" in out


@pytest.mark.parametrize(
    "broken",
    [
        "del sys.modules['vllm.v1.kv_offload.base'].LookupResult",
        "sys.modules['vllm'].__dict__.pop('__version__'); sys.modules['vllm.v1.kv_offload.base'] = None",
        "sys.modules['py_kvcache.vllm_api'] = None",
        "del V1.SupportsHMA",
    ],
)
def test_a_vllm_that_lacks_what_we_use_breaks_no_import(run_python, broken: str):
    out = run_python("EXTRA = {}\n" + ROLE + broken + BUILD)
    assert "LOG py-kvcache cannot be used here and stays off" in out
    assert "ERROR RuntimeError py-kvcache could not be imported" in out


def test_an_error_of_any_kind_while_importing_is_caught(run_python):
    code = """
class Angry:
    def find_spec(self, name, path=None, target=None):
        if name == "py_kvcache.spec":
            raise MemoryError("not now")
sys.meta_path.insert(0, Angry())
"""
    assert "LOG py-kvcache cannot be used here and stays off: MemoryError: not now" in run_python(code + SHOW)


def test_without_vllm_the_import_succeeds_and_building_says_why(run_python):
    out = run_python("import sys\nEXTRA = {}\n" + BUILD, vllm=False, blocked=("vllm",))
    assert "CLASS py_kvcache.inert Unavailable" in out
    assert "vllm is blocked" in out.split("ERROR")[1]


def test_the_module_says_what_it_lacks_as_python_does(run_python):
    out = run_python(
        "import py_kvcache.connector as m\n"
        "try:\n    m.nothing\nexcept AttributeError as error:\n    print(error)\nprint(m.__all__)"
    )
    assert "no attribute 'nothing'" in out
    assert "['PyKvCacheConnector']" in out


# ---- with the real vLLM


@pytest.fixture(scope="module")
def inert() -> Any:
    pytest.importorskip("vllm", reason="the inert connector is built on vLLM's own base classes")
    from py_kvcache import inert as module

    return module


def vllm_config(**extra: Any) -> SimpleNamespace:
    transfer = SimpleNamespace(
        kv_role="kv_producer",
        is_kv_producer=True,
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"root": "/nowhere/at/all", **extra},
    )
    return SimpleNamespace(kv_transfer_config=transfer)


def connector(role_name: str, config: SimpleNamespace) -> Any:
    from py_kvcache.active import PyKvCacheConnector
    from py_kvcache.vllm_api import KVConnectorRole

    return PyKvCacheConnector(config, KVConnectorRole[role_name], SimpleNamespace(kv_cache_groups=[]))


@pytest.fixture
def disabled(inert: Any) -> Any:
    return connector("SCHEDULER", vllm_config(on_unsupported="disable"))


def test_an_unsupported_setting_stops_the_start_with_one_sentence(inert: Any):
    from py_kvcache.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match='needs "kv_role": "kv_both"'):
        connector("SCHEDULER", vllm_config())


def test_a_wrong_setting_stops_the_start_even_with_disable(inert: Any):
    from py_kvcache.errors import ConfigError

    with pytest.raises(ConfigError, match="did you mean 'io_depth'"):
        connector("SCHEDULER", vllm_config(on_unsupported="disable", iodepth=1))


def test_with_disable_it_is_a_connector_with_every_abstract_method_that_does_nothing(disabled: Any):
    from py_kvcache.vllm_api import KVConnectorBase_V1, OffloadingConnector, SupportsHMA

    assert isinstance(disabled, (KVConnectorBase_V1, SupportsHMA))
    assert not isinstance(disabled, OffloadingConnector)
    assert not type(disabled).__abstractmethods__
    assert disabled.get_num_new_matched_tokens(None, 0) == (0, False)
    assert disabled.update_state_after_alloc(None, None, 0) is None
    assert disabled.build_connector_meta(None) is not None
    assert disabled.request_finished(None, []) == (False, None)
    assert disabled.request_finished_all_groups(None, ([],)) == (False, None)
    assert disabled.get_finished(set()) == (None, None)
    assert disabled.get_block_ids_with_load_errors() == set()
    assert not disabled.has_pending_push_work()
    for call in (
        lambda: disabled.start_load_kv(None, kernel=1),
        lambda: disabled.wait_for_layer_load("layer"),
        lambda: disabled.save_kv_layer("layer", None, None, more=1),
        disabled.wait_for_save,
        lambda: disabled.register_kv_caches({}),
        lambda: disabled.update_connector_output(None),
        disabled.shutdown,
    ):
        assert call() is None


def test_a_preempted_request_waits_for_nothing_of_a_disabled_connector(disabled: Any):
    if not hasattr(type(disabled).__mro__[1], "requires_kv_delivery"):
        pytest.skip("this vLLM does not ask")
    assert disabled.requires_kv_delivery is False


def test_a_disabled_connector_warns_once_and_shows_a_gauge_in_the_scheduler_only(
    inert: Any, caplog: pytest.LogCaptureFixture
):
    from py_kvcache.metrics import DISABLED

    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, "vllm.py_kvcache"):
        scheduler = connector("SCHEDULER", vllm_config(on_unsupported="disable"))
        worker = connector("WORKER", vllm_config(on_unsupported="disable"))
    said = [record for record in caplog.records if "serves without a cache" in record.message]
    assert len(said) == 1
    assert "kv_both" in said[0].message
    assert scheduler.get_kv_connector_stats().data["data"] == {DISABLED.name: {(): 1}}
    assert worker.get_kv_connector_stats() is None


def test_a_disabled_connector_leaves_vllms_own_failure_policy_alone(inert: Any):
    config = vllm_config(on_unsupported="disable")
    connector("SCHEDULER", config)
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


def test_a_root_that_cannot_be_made_is_named_with_its_errno(inert: Any, tmp_path):
    from py_kvcache.active import prepare_root
    from py_kvcache.config import parse_config
    from py_kvcache.errors import RootError

    (tmp_path / "file").write_bytes(b"")
    for root, name in ((tmp_path / "no" / "such", "ENOENT"), (tmp_path / "file", "ENOTDIR")):
        with pytest.raises(RootError, match=rf"{root}: .*\[{name}\]"):
            prepare_root(parse_config({"root": str(root)}, {}))


def test_a_missing_root_is_made_when_its_parent_exists(inert: Any, tmp_path):
    from py_kvcache.active import prepare_root
    from py_kvcache.config import parse_config

    settings = parse_config({"root": str(tmp_path / "cache"), "dir_mode": "2775"}, {})
    prepare_root(settings)
    prepare_root(settings)
    assert (tmp_path / "cache").stat().st_mode & 0o7777 == 0o2775


def test_the_settings_of_vllm_are_filled_in_once_and_reading_them_again_changes_nothing(inert: Any):
    from py_kvcache.active import read_settings

    config = vllm_config(block_tokens=64)
    first = read_settings(config)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert (extra["spec_name"], extra["spec_module_path"]) == ("PyKvCacheSpec", "py_kvcache.spec")
    assert extra["block_size"] == 64
    assert read_settings(config) == first
