"""Makes the shared fixtures (`import tiny`) importable from every folder of the tests."""

import pathlib
import sys

_HERE = str(pathlib.Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
