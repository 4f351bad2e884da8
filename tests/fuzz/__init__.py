"""Random small models on random meshes, with random legal strategies: each must compute what one device computes, or be refused in words.

``python -m tests.fuzz --seeds 100`` from the top of the repository. A seed that fails is made as small as it can be, and printed as code.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what the tests share is found as pytest finds it
