"""What passes between rooms."""

from __future__ import annotations

from calibeam.records import Example, hash_of, some_of


def test_some_examples_are_chosen_by_their_ids_and_keep_their_order() -> None:
    examples = [Example(str(number), "source", ("target",)) for number in range(1000)]
    assert some_of(examples, 0) is some_of(examples, 1000) is examples
    chosen = some_of(examples, 100)
    assert {example.id for example in chosen} == set(sorted(map(str, range(1000)), key=hash_of)[:100])
    numbers = [int(example.id) for example in chosen]
    assert numbers == sorted(numbers)
    assert 20 <= sum(number >= 700 for number in numbers) <= 40  # not the first ones: 30 of 100 are expected
    assert some_of(examples[::-1], 100) == chosen[::-1]
