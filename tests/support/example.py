"""`examples/grpo.py` unchanged, on a machine that may have no compiler: example.py [arguments of the example]"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"

if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") and importlib.util.find_spec("deepspeed"):
        from support.ways import without_compiled_parts

        without_compiled_parts()
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")

    from support.launch import end_without_finalizing

    end_without_finalizing()
