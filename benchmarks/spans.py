"""What a whole answer costs as one target, against explaining each of its tokens.

A Mamba in the shape of mamba-130m with random weights. The span is explained in one pass.
Only the last of its tokens is explained by itself: `ratio` is extrapolated, as if each of them cost
as much.

    python benchmarks/spans.py --layers 24 --prompt 512 --tokens 64 512 --cpu-time
"""

from __future__ import annotations

from functools import partial

import torch
import transformers
from _timing import keep, options, parsed, rounded, seconds
from end_to_end import model_of

from captum_ssm import MambaLRP, MambaRollout, continuation_relevance, trace


def main() -> None:
    parser = options(__doc__, "spans", repeats=1)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    args = parsed(parser)
    transformers.logging.set_verbosity_error()
    model, rows = model_of(args.layers), []
    ids = torch.randint(model.config.vocab_size, (1, args.prompt + max(args.tokens)))
    for name, kind in {"lrp": MambaLRP, "rollout": MambaRollout}.items():
        method = kind(model)
        # The first calls also look at how the layers hang together.
        method.attribute(ids[:, :64], target=(63, 1))
        continuation_relevance(method, ids[:, :60], ids[0, 60:64], span=(0, -1))
        for count in args.tokens:
            prompt, answer = ids[:, : args.prompt], ids[0, args.prompt : args.prompt + count]
            whole = partial(continuation_relevance, method, prompt, answer, span=(0, -1))
            text = torch.cat([prompt, answer[None, :-1]], 1)
            target = text.shape[1] - 1, int(answer[-1])
            single = partial(method.attribute, text, target=target)

            def hop(method=method, prompt=prompt, answer=answer) -> None:
                trace(method, prompt, answer, hops=1)

            timed = [whole, single, hop] if name == "lrp" else [whole]
            taken = seconds(*timed, repeats=args.repeats)
            row = {"method": name, "tokens": count, "span_s": taken[0]}
            if name == "lrp":
                ratio = taken[1] * count / taken[0]
                row |= {"single_s": taken[1], "one_hop_s": taken[2], "ratio": ratio}
            print(rounded(row), flush=True)
            rows.append(row)
    keep(args, rows, layers=args.layers, prompt=args.prompt, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
