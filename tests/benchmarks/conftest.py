"""What several benchmarks measure: a tiny model in a folder, and the profile of one."""

import profile_model
import pytest
from helpers.tiny import tiny_config, tiny_model, tiny_weights, write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    config = tiny_config()
    return write_model(tmp_path_factory.mktemp("m") / "m", config, tiny_weights(config))


@pytest.fixture(scope="session")
def profiled():
    """Rows of a model's profile beside those of the same model again."""
    models = dict.fromkeys(("", "again"), tiny_model())
    return list(profile_model.profile(models, tokens=20, decode=2, samples=3, budget=1))


@pytest.fixture
def fails(capsys):
    """Checks that a command ended with status 2 and one line that holds these words."""

    def check(status, words):
        err = capsys.readouterr().err
        assert status == 2 and words in err and err.count("\n") == 1, err

    return check
