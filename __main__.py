"""`python -m mirrorsd`: the `mirrorsd` command without the console script."""

from mirrorsd.cli import main

if __name__ == "__main__":
    main()
