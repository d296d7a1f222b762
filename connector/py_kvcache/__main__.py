"""`python -m py_kvcache`: the command line where no script was installed (payload on PYTHONPATH)."""

from py_kvcache.cli import main

if __name__ == "__main__":
    main()
