"""The command `hf-qknorm` from within the package: `hf_qknorm.cli.main`, and `python -m hf_qknorm.cli`."""

import sys

from hf_qknorm_command import main as main

if __name__ == "__main__":
    sys.exit(main())
