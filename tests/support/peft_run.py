"""Unit tests under the PEFT that comes first on the path: python peft_run.py TEST_FILE...

Prints its version and where it lies, then what pytest says.
"""

import sys

import peft
import pytest

if __name__ == "__main__":
    print(f"peft {peft.__version__} in {peft.__file__}", flush=True)
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", *sys.argv[1:]]))
