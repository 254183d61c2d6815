import pytest

from harness.strength.block import Block


@pytest.fixture(params=[Block(2, 3, 4, 4), Block(2, 5, 4, 2, first_token=4)], ids=["two-layers", "later-block"])
def block(request):
    return request.param
