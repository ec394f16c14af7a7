"""The tables of file names hold every file that transformers' own classes write."""

from __future__ import annotations

import pytest
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from hf_qknorm.families import known_families
from hf_qknorm.files.names import LICENCE, TOKENIZER_FILES


def test_a_push_takes_every_file_of_a_tokenizer():
    for name in {TOKENIZER_MAPPING_NAMES.get(model_type) for model_type in known_families()} - {None}:
        try:
            files = tokenizer_class_from_name(name).vocab_files_names or {}
        except ImportError:  # of a library that is not installed
            continue
        assert {*files.values()} <= {*TOKENIZER_FILES}, name


@pytest.mark.parametrize(
    "name", ["LICENSE", "LICENSE.md", "LICENSE-APACHE-2.0.txt", "licence_v1.1", "Notice.txt", "USE_POLICY.md"]
)
def test_licences_are_known_by_their_names(name):
    assert LICENCE.fullmatch(name)
    assert not LICENCE.fullmatch(f"my{name}")
