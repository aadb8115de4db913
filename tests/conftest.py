"""For all tests: one thread for torch, here and in the processes that tests start.

The models are tiny, the machines of CI are small, and threads that wait for each other by spinning make everything slow.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
