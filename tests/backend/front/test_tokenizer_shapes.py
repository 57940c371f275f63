"""2,000 texts each against the tokenizers library itself, for folders in the shapes of models."""

from itertools import pairwise

import pytest

from tests.texts import random_texts
from tests.tokenizer_shapes import SHAPES, Shape, save
from tritium.backend.front.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.__name__)
def shape(request) -> Shape:
    return request.param()


@pytest.fixture(scope="module")
def loaded(shape, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("shape")
    save(shape, folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def texts(shape) -> list[str]:
    return random_texts(2000, seed=2, special=shape.special)


def test_token_ids(shape, loaded, texts):
    bos = [shape.fast.token_to_id(shape.bos)] if shape.bos else []
    plain = [each.ids for each in shape.fast.encode_batch(texts, add_special_tokens=False)]
    wanted = [ids if bos and ids[:1] == bos else bos + ids for ids in plain]
    different = [
        text for text, ids in zip(texts, wanted, strict=True) if loaded.encode(text) != ids
    ]
    assert different == []


def test_streamed_text(shape, loaded, texts):
    different = []
    for prompt, text in pairwise(texts[:400]):
        prompt_ids = loaded.encode(prompt)
        token_ids = shape.fast.encode(text, add_special_tokens=False).ids
        before = shape.fast.decode(prompt_ids)
        whole = shape.fast.decode(prompt_ids + token_ids)
        stream = loaded.detokenizer(prompt_ids, skip_special_tokens=True)
        pieces = [stream.add(token_id) for token_id in token_ids]
        if before + "".join(pieces) + stream.finish() != whole:
            different.append((prompt, text))
    assert different == []


def test_json_is_that_of_the_file(shape, loaded):
    """Grammars are compiled from it."""
    assert loaded.vocab_size == shape.fast.get_vocab_size()
    assert [loaded.special_token_id(text) for text in shape.special] == [
        shape.fast.token_to_id(text) for text in shape.special
    ]
