"""Python runs this at its start in every process of a server of the comparison, whose path has this folder."""

import os
from pathlib import Path

from versus.sampler import FOLDER_VARIABLE, watch

watch(Path(os.environ[FOLDER_VARIABLE]))
