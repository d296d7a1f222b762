"""`make demo`: a real vLLM reads a long document once, is restarted, and answers again from files.

Two servers are started one after the other on the CPU. The first answers a question about a document twice:
opted out of the cache, and storing it on an empty root. The second, on the same root, is asked the same.
Ends with 1 and one sentence when the restarted server computed what it should have loaded, or when its
answer differs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

import model
from report import SCHEMA, Asked, Outcome, show
from server import MAX_MODEL_LEN, Server, ServerError, transfer_config

HERE = Path(__file__).parent
SYSTEM = "You answer questions about a document, briefly and in its own words."
QUESTIONS = ("When was the light first lit?", "What is the name of the station's own boat?")
OTHER_QUESTIONS = ("What is this document about?", "What should a reader remember from it?")
# Another text than the document's, and shorter than one storage block: it loads and stores nothing.
WARM_UP = "Name three colours of the rainbow."
ANSWER_TOKENS = 48
MAX_DOCUMENT_TOKENS = MAX_MODEL_LEN - ANSWER_TOKENS - 256
STORED_WITHIN_S = 60.0
SIGN_OF_LIFE_EVERY_S = 15.0

T = TypeVar("T")


class DemoError(Exception):
    """What the demo should have shown and did not, in one sentence."""


class Progress:
    """One line for each step: its number, what is done, how long it took."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._step = console, steps, 0

    def run(self, what: str, work: Callable[[], T], result: Callable[[T], str] = lambda _: "") -> T:
        """Do one step; a spinner shows it on a terminal, lines elsewhere; one line stays of it everywhere."""
        self._step += 1
        assert self._step <= self._steps, "a step that nobody announced"
        head = f"\\[{self._step:>2}/{self._steps}]"
        began = time.monotonic()
        with self._signs_of_life(f"{head} {what}"):
            value = work()
        told = result(value)
        self._console.print(
            f"{head} {what}: [bold]{told or 'done'}[/] [dim]({time.monotonic() - began:.1f} s)[/]",
            highlight=False,
            soft_wrap=True,
        )
        return value

    @contextmanager
    def _signs_of_life(self, what: str) -> Iterator[None]:
        if self._console.is_terminal:
            with self._console.status(f"{what} ..."):
                yield
            return
        self._console.print(f"{what} ...", highlight=False)
        over, began = threading.Event(), time.monotonic()

        def tell() -> None:
            while not over.wait(SIGN_OF_LIFE_EVERY_S):
                self._console.print(f"{what} ... {time.monotonic() - began:.0f} s", highlight=False)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()


def read_document(path: Path | None, model_folder: Path) -> tuple[str, int, list[str]]:
    """The document, its length in tokens, and notes (it is cut to what the model can take)."""
    from tokenizers import Tokenizer

    text = (path or HERE / "data" / "document.txt").read_text(errors="replace")
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    if not tokens:
        raise DemoError(f"the document {path} is empty")
    if len(tokens) <= MAX_DOCUMENT_TOKENS:
        return text, len(tokens), []
    note = f"the document has {len(tokens):,} tokens; the model takes its first {MAX_DOCUMENT_TOKENS:,}"
    return tokenizer.decode(tokens[:MAX_DOCUMENT_TOKENS]), MAX_DOCUMENT_TOKENS, [note]


def convert_model() -> Path:
    """The model's folder; converted in a child process, whose noise is shown only if it fails."""
    done = subprocess.run(
        [sys.executable, str(HERE / "model.py")], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise DemoError(f"the model could not be converted:\n{done.stderr[-2000:]}")
    return model.model_folder()


# Neither loads nor stores, and its salt keeps it out of vLLM's own prefix cache for those who ask after it.
WITHOUT_CACHE = {"kv_transfer_params": {"py_kvcache": {"load": False, "store": False}}, "cache_salt": "alone"}


def ask(server: Server, document: str, question: str, more: Mapping[str, Any] | None = None) -> Asked:
    """Ask one question about the document and read from /metrics what it took."""
    before = server.metrics()
    answer = server.ask(
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
        ],
        ANSWER_TOKENS,
        more,
    )
    after = server.metrics()

    def grown(name: str) -> int:
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    return Asked(
        answer,
        from_files=grown("vllm:external_prefix_cache_hits_total"),
        from_engine=grown("vllm:prefix_cache_hits_total"),
        bytes_loaded=grown("vllm:py_kvcache_load_bytes_total"),
    )


def stored_files(root: Path) -> list[Path]:
    """The published block files under the root."""
    return [path for path in root.rglob("*.bin") if path.is_file()]


def wait_until_stored(root: Path) -> list[Path]:
    """Stores go on after the answer; done when no temporary file is left and the count stands still.

    Raises:
        DemoError: nothing was stored, or stores did not come to an end.
    """
    deadline, seen, quiet_since = time.monotonic() + STORED_WITHIN_S, -1, time.monotonic()
    while time.monotonic() < deadline:
        files = stored_files(root)
        if len(files) != seen or next(root.rglob(".*.tmp"), None):
            seen, quiet_since = len(files), time.monotonic()
        elif files and time.monotonic() - quiet_since > 1.0:
            return files
        time.sleep(0.1)
    raise DemoError(f"no file was stored under {root}" if seen < 1 else "stores did not come to an end")


class Demo:
    """The steps, and the server that is running, so that its log can be shown when one fails."""

    STEPS = 10

    def __init__(self, console: Console, work: Path) -> None:
        self.work = work
        self._console, self._progress = console, Progress(console, self.STEPS)
        self.server: Server | None = None

    def run(self, document_path: Path | None, questions: tuple[str, str]) -> Outcome:
        """All steps in order.

        Raises:
            DemoError, ServerError: a step failed.
        """
        step, root = self._progress.run, self.work / "root"
        known = model.model_folder().is_dir()
        folder = step(
            "model: " + ("found in the cache" if known else "converting (once)"), convert_model, str
        )
        document, tokens, notes = read_document(document_path, folder)
        self._console.print(
            f"        document: {document_path or 'bundled'}, {tokens:,} tokens", highlight=False
        )

        # The server that stores ends in order; the other one has nothing to lose, and ends 6 s sooner.
        with self._serve("cold.log", folder, root, "--shutdown-timeout", "20") as server:
            self._start(server, "vLLM with py-kvcache on an empty root")
            no_cache = step(
                "asking about the document, without the cache",
                lambda: ask(server, document, questions[0], WITHOUT_CACHE),
                str,
            )
            if stored_files(root):
                raise DemoError(f"a request that opted out of the cache left files under {root}")
            cold = step("asking the same, with it", lambda: ask(server, document, questions[0]), str)
            files = step(
                "waiting for its stores", lambda: wait_until_stored(root), lambda found: f"{len(found)} files"
            )
            step("stopping it", server.stop)
        with self._serve("warm.log", folder, root) as server:
            self._start(server, "a new vLLM on the same root")
            warm = step("asking the same again", lambda: ask(server, document, questions[0]), str)
            second = step("asking a second question", lambda: ask(server, document, questions[1]), str)
            step("stopping it", server.stop)
        size = sum(path.stat().st_size for path in files)
        return Outcome(no_cache, cold, warm, second, len(files), size, notes)

    def _serve(self, log: str, folder: Path, root: Path, *arguments: str) -> Server:
        self.server = Server(folder, self.work / log, transfer=transfer_config(root), arguments=arguments)
        return self.server

    def _start(self, server: Server, what: str) -> None:
        self._progress.run(f"starting {what}", server.start)
        # The first request after a start is two to five times slower, whatever it asks.
        server.ask([{"role": "user", "content": WARM_UP}], 8)


def prepare_work(work: Path) -> Any:
    """An empty folder of this demo's own, kept afterwards for a look; returns the lock that guards it."""
    work.mkdir(parents=True, exist_ok=True)
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DemoError(f"another demo is running in {work}; give another folder with --work") from None
    for entry in work.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()
    (work / "root").mkdir()
    return lock


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--document", type=Path, help="a text file to ask about (default: a bundled one)")
    parser.add_argument(
        "--question", help="asked three times: without the cache, storing, and after the restart"
    )
    parser.add_argument("--second-question", help="asked of the restarted server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(".demo"),
        help="folder for files and logs, emptied first (default: .demo)",
    )
    return parser.parse_args()


def main() -> int:
    """Run the demo; 0 if it showed what it should, else 1."""
    options, console = parse_arguments(), Console()
    # SIGTERM unwinds like Ctrl-C, so that no server outlives us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    default = OTHER_QUESTIONS if options.document else QUESTIONS
    questions = (options.question or default[0], options.second_question or default[1])
    began, demo = time.monotonic(), None
    try:
        if options.document and not options.document.is_file():
            raise DemoError(f"there is no file {options.document}")
        work = options.work.resolve()
        lock = prepare_work(work)
        demo = Demo(console, work)
        outcome = demo.run(options.document, questions)
        lock.close()
    except (DemoError, ServerError, OSError) as error:
        if options.json:
            write_json(options.json, {"schema": SCHEMA, "ok": False, "problem": str(error)})
        return fail(console, str(error), demo)
    except KeyboardInterrupt:
        return fail(console, "interrupted", None)
    if options.json:
        write_json(options.json, outcome.as_json())
    show(console, outcome, questions)
    if problem := outcome.problem():
        return fail(console, problem, demo)
    faster = outcome.no_cache.answer.ttft_s / outcome.warm.answer.ttft_s
    console.print(
        f"[green]Same text, {faster:.1f} times sooner after the restart.[/] "
        f"{time.monotonic() - began:.0f} s in all.\n"
        f"Files and logs are in {escape(str(options.work))}; look at them with "
        f"`{escape(tool())} inspect {escape(str(options.work / 'root'))}`.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def tool() -> str:
    """How the user calls py-kvcache from where he is."""
    script = Path(sys.executable).with_name("py-kvcache")
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """One object for scripts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def fail(console: Console, sentence: str, demo: Demo | None) -> int:
    """Say what went wrong, with what the last server's log says."""
    if demo is not None and demo.server is not None and demo.server.log.exists():
        console.print(f"\n[dim]--- from {escape(str(demo.server.log))}[/]", highlight=False, soft_wrap=True)
        console.print(escape(demo.server.log_excerpt()), highlight=False, soft_wrap=True)
        console.print("[dim]---[/]")
    console.print(f"[bold red]demo failed:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
