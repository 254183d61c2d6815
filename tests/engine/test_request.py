"""What an engine refuses before it keeps anything of it, and what a request still has to compute."""

import pytest

from engine.checksum.verdict import NO_LOAD
from engine.errors import RequestError
from engine.request import FinishReason, Request, RequestOutput, check_request
from engine.tokenizer import EOS, VOCAB_SIZE


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 1, "needs a prompt of one token or more"),
        ([1], 0, "max_tokens of 1 or more"),
        ([1], -3, "max_tokens of 1 or more"),
        ([1], None, "max_tokens of 1 or more"),
        ([1], 2.0, "max_tokens of 1 or more"),
        ([1], True, "max_tokens of 1 or more"),
        ([1, -1], 1, f"integers from 0 to {VOCAB_SIZE - 1}"),
        ([VOCAB_SIZE], 1, f"integers from 0 to {VOCAB_SIZE - 1}"),
        ([1.0], 1, "token ids are integers"),
        ([None], 1, "token ids are integers"),
        (["1"], 1, "token ids are integers"),
        ([True], 1, "token ids are integers"),
        ([1] * 18, 3, "prompt and output are 21 tokens, max_model_len is 20"),
        ([1], 10**30, "max_model_len is 20"),
    ],
)
def test_what_can_never_run_is_refused(prompt, max_tokens, says):
    with pytest.raises(RequestError, match=says) as refused:
        check_request(Request("r7", prompt, max_tokens), 20)
    assert str(refused.value).startswith("request r7: ")


@pytest.mark.parametrize("params", [[], "do_remote_prefill", 3, True, [("do_remote_prefill", True)]])
def test_parameters_that_are_no_mapping_are_refused(params):
    with pytest.raises(RequestError, match="kv_transfer_params is a "):
        check_request(Request("r", [1], 1, params), 20)


@pytest.mark.parametrize("params", [None, {}, {"anything": object()}])
def test_what_fits_exactly_is_taken(params):
    check_request(Request("r", [0, VOCAB_SIZE - 1, EOS] * 6, 2, params), 20)


def test_what_is_left_to_compute():
    request = Request("r", [1, 2, 3], 2)
    assert request.num_to_compute == 3
    request.num_computed_tokens, request.num_placeholders = 3, 1
    assert request.num_to_compute == 1, "the token that is being sampled"
    request.num_computed_tokens, request.num_placeholders = 4, 2
    assert request.num_to_compute == 0, "both outputs are on their way"
    request.output_token_ids, request.num_placeholders = [9], 1
    assert request.num_to_compute == 0
    assert (request.num_tokens, request.all_token_ids) == (4, [1, 2, 3, 9])


@pytest.mark.req("POL-4")
def test_a_load_is_wanted_once():
    request = Request("r", [1], 1, {"do_remote_prefill": True})
    assert request.wants_remote_prefill
    request.load_started = True
    assert not request.wants_remote_prefill


def test_the_answer_is_what_the_request_ended_as():
    request = Request("r", [1], 2, output_token_ids=[5], recomputed=True, error="why")
    with pytest.raises(ValueError, match="has not ended"):
        RequestOutput.of(request)
    request.finish_reason = FinishReason.ERROR
    output = RequestOutput.of(request, {"a": 1})
    assert output == RequestOutput("r", (5,), FinishReason.ERROR, "why", {"a": 1}, NO_LOAD, True)


def test_normal_ends():
    assert [reason for reason in FinishReason if reason.normal] == ["stop", "length"]
