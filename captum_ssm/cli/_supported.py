"""List a model's token mixers, check that they are reproduced, and estimate each method's cost."""

from __future__ import annotations

import argparse

from captum_ssm._report import report
from captum_ssm.cli._arguments import check_model
from captum_ssm.cli._loading import add_loading, check_device, load_config, load_model, quiet


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("model", help="a hub name, or a folder")
    parser.add_argument(
        "--length", type=int, default=1024, help="tokens the costs are for. Default: 1024"
    )
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="read the configuration alone: lists the mixers without loading weights",
    )
    add_loading(parser)


def run(args: argparse.Namespace) -> None:
    """Print the report."""
    if args.length < 1:
        raise ValueError(f"--length is {args.length}; expected at least one token.")
    check_model(args.model)
    check_device(args.device)
    with quiet():
        model = load_config(args.model) if args.config_only else load_model(args)
        report(model, args.length, with_weights=not args.config_only)
