"""The matrix of test_real_model.py in bfloat16."""

import pytest
from test_real_model import check_matrix


@pytest.mark.slow
def test_text_and_logits_are_bit_identical_across_drafters_and_batch():
    check_matrix("bfloat16")
