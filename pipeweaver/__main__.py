"""`python -m pipeweaver` is the `pipeweaver` command."""

from pipeweaver.cli import main

if __name__ == "__main__":
    main()
