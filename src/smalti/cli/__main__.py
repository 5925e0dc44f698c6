import sys

from smalti.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
