"""Ray where there is none: said at once, not after Ray's own minutes; and the settings that name it."""

import pytest

from infra.ports import free_ports
from infra.ray_node import RayUnavailable, connected_ray
from infra.settings import Settings, WrongSetting

pytestmark = pytest.mark.unit


def test_an_address_where_nothing_answers_is_named() -> None:
    (port,) = free_ports(1, "20000-32767")
    settings = Settings(map_runner="ray", ray_address=f"127.0.0.1:{port}")
    with (
        pytest.raises(RayUnavailable, match=f"nothing answers at EAGLE3_RAY_ADDRESS 127.0.0.1:{port}"),
        connected_ray(settings, workers=1),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value"),
    [("EAGLE3_MAP_RUNNER", "spark"), ("EAGLE3_MAP_WORKERS", "0"), ("EAGLE3_RAY_ADDRESS", "ray://head:10001")],
)
def test_a_setting_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongSetting, match=name):
        Settings.load()
