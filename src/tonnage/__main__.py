"""`python -m tonnage`: the `tonnage` command if it is not on the PATH."""

from tonnage.commands.main import main

if __name__ == "__main__":
    main()
