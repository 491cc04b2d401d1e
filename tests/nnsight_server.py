"""What an nnsight server does with requests: run their blocks on the model it holds.

Run as a program, in a process of its own and without this package: reads requests from standard
input, each behind its length in eight bytes, and writes what their blocks saved, or a
traceback, in the same form.

    python nnsight_server.py CHECKPOINT
"""

import io
import sys
import traceback

import torch
from nnsight import TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing.tracer import dec, inc
from transformers import PreTrainedTokenizerFast


def answer(model: TransformersModel, request: bytes) -> bytes:
    """The values that a request's block saved."""
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


def main() -> None:
    sys.modules["captum_ssm"] = None  # importing it fails: it is not installed there
    folder = sys.argv[1]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = TransformersModel(folder, tokenizer=tokenizer, task="text-generation", dispatch=True)
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    while size := incoming.read(8):
        request = incoming.read(int.from_bytes(size, "big"))
        try:
            result = answer(model, request)
        except Exception:
            result = b"error" + traceback.format_exc().encode()
        outgoing.write(len(result).to_bytes(8, "big") + result)
        outgoing.flush()


if __name__ == "__main__":
    main()
