"""The methods in inseq: the same numbers as without it, for each token of an answer."""

import pytest
import torch

import captum_ssm
from captum_ssm.attr import LaTIM, MambaLRP

inseq = pytest.importorskip("inseq")
names = pytest.importorskip("captum_ssm.integrations.inseq")

PROMPT = "The bird near the dogs sings . The dogs near the bird"
ANSWER = " bark . The"


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = captum_ssm.examples.load("stories-mamba")
    tokenizer.bos_token = tokenizer.unk_token
    model.config.bos_token_id = tokenizer.bos_token_id
    return inseq.load_model(model, "mamba_lrp", tokenizer=tokenizer)


def explained(loaded, answer=ANSWER, **options):
    options = {"attributed_fn": "logit", "show_progress": False, **options}
    return loaded.attribute(PROMPT, PROMPT + answer, **options).sequence_attributions[0]


def rows(loaded, method, **options):
    """What the method says of each token of the answer, by itself."""
    ids = loaded.tokenizer(PROMPT + ANSWER, return_tensors="pt").input_ids
    P = len(loaded.tokenizer(PROMPT).input_ids)
    return [
        method.attribute(ids[:, :n], target=int(ids[0, n]), **options)
        for n in range(P, ids.shape[1])
    ]


@pytest.mark.parametrize("name", captum_ssm.attr.methods())
def test_each_method_says_what_it_says_by_itself(name, loaded):
    method = captum_ssm.attr.methods()[name](loaded.model)
    found = explained(loaded, method=name.replace("-", "_")).target_attributions
    truth = rows(loaded, method)
    assert found.shape[1] == len(truth) == 3
    for k, row in enumerate(truth):
        torch.testing.assert_close(found[: row.shape[1], k], row[0], atol=1e-6, rtol=1e-4)


def test_options_and_deltas_are_passed_on(loaded):
    norms = explained(loaded, method="latim", aggregation="l2", layer=-1).target_attributions
    truth = rows(loaded, LaTIM(loaded.model), aggregation="l2", layer=-1)
    torch.testing.assert_close(norms[: truth[0].shape[1], 0], truth[0][0], atol=1e-6, rtol=1e-4)
    found = explained(loaded, method="mamba_lrp", return_convergence_delta=True)
    deltas = [
        delta for _, delta in rows(loaded, MambaLRP(loaded.model), return_convergence_delta=True)
    ]
    torch.testing.assert_close(found.step_scores["deltas"], torch.cat(deltas), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Contrastive inputs do not match")  # inseq says so always
def test_an_answer_against_another_one(loaded):
    options = {"attributed_fn": "contrast_logits_diff", "contrast_targets": PROMPT + " sings"}
    found = explained(loaded, " bark", **options).target_attributions[:, 0]
    ids = loaded.tokenizer(PROMPT + " bark sings", return_tensors="pt").input_ids
    prompt, bark, sings = ids[:, :-2], *ids[0, -2:].tolist()
    method = MambaLRP(loaded.model)
    truth = method.attribute(prompt, target=bark) - method.attribute(prompt, target=sings)
    torch.testing.assert_close(found[: truth.shape[1]], truth[0], atol=1e-5, rtol=1e-4)


def test_a_method_that_was_defined_since_is_registered_too(loaded):
    from captum_ssm.attr import TokenAttribution

    class Doubled(MambaLRP):
        name = "doubled-for-inseq"

        def _attribute(self, arguments, **options):
            return super()._attribute(arguments, **options)

    assert issubclass(Doubled, TokenAttribution)
    assert "doubled_for_inseq" not in inseq.list_feature_attribution_methods()
    names.register()
    names.register()
    assert "doubled_for_inseq" in inseq.list_feature_attribution_methods()
