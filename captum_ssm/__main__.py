"""``python -m captum_ssm``: see :mod:`captum_ssm._cli`."""

from captum_ssm._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
