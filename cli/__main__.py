"""`python -m mirrorsd.cli`: the same command without the console script."""

from mirrorsd.cli import main

if __name__ == "__main__":
    main()
