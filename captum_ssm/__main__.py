"""``python -m captum_ssm``: see :mod:`captum_ssm.cli`."""

from captum_ssm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
