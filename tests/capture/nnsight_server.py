"""What an nnsight server does with requests: run their blocks on a model that it holds.

Run as a program, in a process of its own and without this package: reads from standard input the
folder of a checkpoint and a request, each after its length in eight bytes, and writes what the
request's block saved, or a traceback, in the same form.
"""

import io
import sys
import traceback
from functools import cache
from typing import Any, BinaryIO

import torch
from transformers import PreTrainedTokenizerFast

# nnsight is imported by the server alone: here it would change what tests import later.


def answer(model: Any, request: bytes) -> bytes:
    """The values that a request's block saved."""
    from nnsight.schema.request import RequestModel
    from nnsight.tracing.tracer import dec, inc

    tracer = RequestModel.deserialize(request, model._remoteable_persistent_objects())
    given = dict(tracer.info.frame.f_locals)
    inc()
    try:
        tracer.execute(tracer.info.code)
        found = tracer.info.frame.f_locals
    finally:
        dec()
    buffer = io.BytesIO()
    torch.save({k: v for k, v in found.items() if v is not given.get(k)}, buffer)
    return buffer.getvalue()


@cache
def loaded(folder: str) -> Any:
    from nnsight import TransformersModel

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return TransformersModel(folder, tokenizer=tokenizer, task="text-generation", dispatch=True)


def send(stream: BinaryIO, *parts: bytes) -> None:
    for part in parts:
        stream.write(len(part).to_bytes(8, "big") + part)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    return stream.read(int.from_bytes(stream.read(8), "big"))


def main() -> None:
    sys.modules["captum_ssm"] = None  # importing it fails: it is not installed there
    while folder := receive(sys.stdin.buffer):
        request = receive(sys.stdin.buffer)
        try:
            result = answer(loaded(folder.decode()), request)
        except Exception:
            result = b"error" + traceback.format_exc().encode()
        send(sys.stdout.buffer, result)


if __name__ == "__main__":
    main()
