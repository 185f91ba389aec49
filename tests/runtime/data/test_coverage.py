"""What a start says of its dataset: passes over each source, and what validation lacks."""

from __future__ import annotations

from pathlib import Path

from holdfast.data.stream.coverage import describe_use
from tests.support.corpus import data_config, make, text_folder, text_source, train_config


def test_passes_over_each_source(tmp_path: Path) -> None:
    a = text_folder(tmp_path / "a", files=30, words=60, seed=1)
    b = text_folder(tmp_path / "b", files=6, words=60, seed=2)
    config = data_config(
        tmp_path / "out", text_source(a, "a", weight=3.0), text_source(b, "b"), processes=0
    )
    dataset = make(config)
    (line,) = describe_use(dataset, config, train_config(batch_size=8, steps=50))
    assert "50 steps of 16 tokens a sample: 400 samples; over the data: a " in line
    sizes = [-(-(s.tokens - 1) // 16) for s in dataset.streams("train")]
    assert f"a {300 / sizes[0]:.2f} passes, b {100 / sizes[1]:.2f} passes" in line


def test_an_empty_validation_set_is_said_with_its_cause(tmp_path: Path) -> None:
    one = text_folder(tmp_path / "one", files=1, words=200)
    config = data_config(tmp_path / "set", text_source(one))
    passes, said = describe_use(make(config), config, train_config())
    assert "over the data" in passes
    assert "the validation set is empty (the dataset is one document" in said
    assert "train.evaluate.every 100 never comes" in said
    assert "cut it into several documents" in said

    two = text_folder(tmp_path / "two", files=4, words=60)
    config = data_config(tmp_path / "none", text_source(two), validation_fraction=0.0)
    _, said = describe_use(make(config), config, train_config(evaluate={"every": 7}))
    assert "(data.validation_fraction is 0)" in said
    assert "train.evaluate.every 7 never comes" in said
    for none_is_wanted in (train_config(evaluate={"every": 0}), train_config()):
        assert len(describe_use(make(config), config, none_is_wanted)) == 1


def test_a_source_with_most_of_the_training_and_no_validation_is_named(tmp_path: Path) -> None:
    big = text_folder(tmp_path / "big", files=1, words=200, seed=3)
    small = text_folder(tmp_path / "small", files=8, words=60, seed=4)

    def lines(weight: float) -> list[str]:
        config = data_config(
            tmp_path / "set", text_source(big, "big", weight=weight), text_source(small, "small")
        )
        return describe_use(make(config), config, train_config())

    _, said = lines(4.0)
    assert "source 'big' makes 80% of the training. The validation set has nothing of it" in said
    assert len(lines(0.25)) == 1
