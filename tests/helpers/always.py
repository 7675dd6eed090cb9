"""train.py in which all work of idle time is done, whatever the clock says: slices of gradients and
of the drafter's training at every tick, chains in every forward.

With --at and --kind it is tests/system/signalled_train.py.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import train
from tests.helpers.drafting import chain_always, train_always
from tests.helpers.streaming import stream_always
from tests.system import signalled_train

if __name__ == "__main__":
    stream_always()
    train_always()
    chain_always()
    sys.exit(signalled_train.main() if "--at" in sys.argv else train.main())
