"""Batches: their tokens, what these predict, and the sequences that are held out."""

import pytest
import torch
from transformers import BertConfig, LlamaConfig

from hf_qknorm.measure.batches import check_batches, count_tokens, divided, longest_sequence, targets

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
LABELS = torch.tensor([[-100, -100, 7, 8, 9, 10]])
LEFT, RIGHT = torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
SHOWN = torch.ones(1, 1, 6, 6).bool().tril()
PACKED = torch.tensor([[0, 1, 0, 1, 2, 3]])
NO = -100


@pytest.mark.parametrize(
    ("config", "inputs", "expected"),
    [
        (LlamaConfig, {}, [6, 7, 8, 9, 10, NO]),
        (LlamaConfig, {"attention_mask": LEFT}, [NO, NO, 8, 9, 10, NO]),
        (LlamaConfig, {"attention_mask": RIGHT}, [6, 7, 8, NO, NO, NO]),
        (LlamaConfig, {"attention_mask": SHOWN}, [6, 7, 8, 9, 10, NO]),
        (LlamaConfig, {"labels": LABELS}, [NO, 7, 8, 9, 10, NO]),
        (LlamaConfig, {"labels": torch.tensor([1])}, [6, 7, 8, 9, 10, NO]),  # a class of the sequence
        (LlamaConfig, {"position_ids": PACKED}, [6, NO, 8, 9, 10, NO]),
        (LlamaConfig, {"position_ids": PACKED, "labels": LABELS}, [NO, NO, 8, 9, 10, NO]),
        (BertConfig, {"labels": LABELS}, [NO, NO, 7, 8, 9, 10]),
        (BertConfig, {"labels": LABELS, "attention_mask": RIGHT}, [NO, NO, 7, 8, NO, NO]),
    ],
)
def test_what_each_token_predicts(config, inputs, expected):
    assert targets({"input_ids": IDS, **inputs}, config()).tolist() == [expected]


def test_padding_counts_as_no_token():
    batches = [{"input_ids": IDS, "attention_mask": LEFT}, {"input_ids": IDS[:, :5], "attention_mask": RIGHT[:, :5]}]
    assert (count_tokens(*batches), longest_sequence(batches)) == (8, 4)
    shown = SHOWN & LEFT.bool()
    for mask in (shown, torch.zeros(1, 1, 6, 6).masked_fill(~shown, -torch.inf), LEFT.bool()[:, None, None]):
        assert count_tokens({"input_ids": IDS.repeat(2, 1), "attention_mask": mask}) == 8
    assert count_tokens({"pixel_values": torch.zeros(3, 1, 2, 2)}) == 3


def test_too_few_tokens_and_tokens_outside_of_the_vocabulary_are_refused():
    padded = [{"input_ids": IDS.repeat(4, 1), "attention_mask": LEFT.repeat(4, 1)}]
    with pytest.raises(ValueError, match="gives 12 tokens to predict, expected at least 16"):
        check_batches(padded, LlamaConfig())
    for token in (-1, 64):
        with pytest.raises(ValueError, match=f"the text holds the token {token}, and the model has 64, from 0 on"):
            check_batches([{"input_ids": torch.tensor([[*range(20), token]])}], LlamaConfig(vocab_size=64))


@pytest.mark.parametrize(
    ("sequences", "bounds", "judging"),
    [
        (1, (4, 9), 1),
        (8, (4, 9), 4),
        (17, (8,), 8),
        (200, (4, 9), 9),
        (200, (4, 99, 121), 61),  # of 2 tokens each
        (200, (4, 99, 500), 99),
        (100, (4, 99, 500), 50),
    ],
)
def test_an_eighth_of_the_sequences_judges_within_bounds(sequences, bounds, judging):
    ids = torch.arange(2 * sequences).view(-1, 2)
    others, judged = divided([{"input_ids": x} for x in torch.split(ids, 5)], *bounds)
    seen = [torch.cat([batch["input_ids"] for batch in part]) if part else ids[:0] for part in (others, judged)]
    assert len(seen[1]) == judging
    assert torch.equal(torch.cat(seen).sort(0).values, ids)
    assert max(len(batch["input_ids"]) for batch in judged) <= 5


@pytest.mark.parametrize(
    "inputs", [{"cu_seq_lens_q": torch.tensor([0, 3, 6])}, {"position_ids": torch.zeros(3, 2, 6).long()}]
)
def test_batches_with_inputs_for_all_sequences_are_not_divided(inputs):
    batches = [{"input_ids": IDS.repeat(2, 1) + i, **inputs} for i in range(8)]
    others, (judged,) = divided(batches)
    assert len(others) == 7
    assert all(torch.equal(judged[name], x) for name, x in batches[0].items())
