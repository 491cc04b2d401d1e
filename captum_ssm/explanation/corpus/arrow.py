"""The package that reads and writes Parquet, where it is installed."""

from __future__ import annotations

from typing import Any


def arrow() -> Any:
    """``pyarrow``, with ``pyarrow.parquet``.

    Raises:
        ImportError: says how it is installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "explained data sets are Parquet files, which need pyarrow: "
            "pip install captum-ssm[data]"
        ) from error
    return pyarrow
