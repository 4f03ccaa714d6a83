"""The pages that a person opens after a run, in headless Chromium. `EAGLE3_SCREENSHOTS=folder` keeps pictures."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.stack import Command

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed"),
]


class Page:
    """A browser page that remembers requests which left this machine."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.foreign: list[str] = []
        page.on("request", self._note)

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")):
            self.foreign.append(request.url)

    def open(self, url: str, *expected: str) -> None:
        """Open an address and wait until every expected text stands on the page."""
        self.page.goto(url, wait_until="domcontentloaded")
        self.shows(*expected)

    def shows(self, *expected: str) -> None:
        for text in expected:
            self.page.get_by_text(text).first.wait_for(timeout=30_000)

    def keep(self, name: str) -> None:
        if folder := os.environ.get("EAGLE3_SCREENSHOTS"):
            self.page.wait_for_timeout(1500)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"),
            headless=True,
            executable_path=CHROMIUM,
            viewport={"width": 1500, "height": 1000},
            args=FLAGS,
        )
        page = Page(context.pages[0])
        yield page
        context.close()
    assert page.foreign == []


def test_prefect_shows_the_run_with_its_stages(page: Page, result: Any) -> None:
    page.open(result["links"]["Prefect run"], "pipeline-tiny", "Completed")
    page.keep("prefect-run")
    page.page.get_by_text("Subflow Runs", exact=True).click()
    page.shows("extract-tiny", "train-tiny")
    page.page.get_by_text("Artifacts", exact=True).click()
    page.shows("lineage")
    page.keep("prefect-artifacts")


def test_prefect_lists_the_deployments(page: Page, command: Command, result: Any) -> None:
    base = _address(command, "prefect")
    page.open(f"{base}/deployments", "7 Deployments")
    page.shows("extract", "validate", "train", "benchmark", "pipeline")
    page.keep("prefect-deployments")


def test_the_form_runs_a_deployment_again_through_its_worker(
    page: Page, command: Command, config: Path, result: Any
) -> None:
    base = _address(command, "prefect")
    deployment = httpx.get(f"{base}/api/deployments/name/validate/cpu").json()["id"]
    page.open(f"{base}/deployments/deployment/{deployment}/run", "Manifest digest")
    fields = page.page.locator("textarea")
    fields.nth(0).fill(result["extracted"]["dump"]["uri"])
    fields.nth(1).fill(result["extracted"]["dump"]["sha256"])
    fields.nth(2).fill(yaml.safe_load(config.read_text())["target"]["path"])
    page.keep("prefect-form")
    page.page.get_by_role("button", name="Submit").click()
    page.page.wait_for_url("**/deployment/**", timeout=30_000)
    runs = _wait_for_runs(base, deployment, count=2)
    assert [run["state"]["type"] for run in runs] == ["COMPLETED", "COMPLETED"]


def test_mlflow_shows_the_dumps_uri_on_the_training_run(page: Page, result: Any) -> None:
    page.open(result["links"]["MLflow training run"], "Datasets", result["extracted"]["dump"]["uri"])
    page.shows("eagle3-tiny")
    page.keep("mlflow-training-run")


def test_mlflow_shows_the_version_with_its_source_run(page: Page, result: Any) -> None:
    page.open(result["links"]["MLflow model version"], "Version 1", "Source Run", "champion")
    page.keep("mlflow-version")
    page.page.get_by_role("link", name=re.compile(r"^train \d")).first.click()
    page.shows("Datasets", result["extracted"]["dump"]["uri"])


def _address(command: Command, part: str) -> str:
    return next(str(found["url"]) for found in command.json("status") if found["name"] == part)


def _wait_for_runs(base: str, deployment: str, *, count: int) -> list[dict[str, Any]]:
    """The deployment's runs, once there are as many and all have ended."""
    wanted = {"deployments": {"id": {"any_": [deployment]}}}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        runs: list[dict[str, Any]] = httpx.post(f"{base}/api/flow_runs/filter", json=wanted).json()
        if len(runs) >= count and all(run["end_time"] for run in runs):
            return runs
        time.sleep(1)
    raise AssertionError(f"expected {count} runs that ended, got {[run['state']['name'] for run in runs]}")
