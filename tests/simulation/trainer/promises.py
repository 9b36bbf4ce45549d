"""What the trainer promises whatever happens, one method each. A promise that is broken is noted with what broke it.

The world knows what no program can: which state is right after each step, which damage it did itself, and who is dead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.simulation.trainer.bucket import Stored
from tests.simulation.trainer.ends import EndPromises
from training.checkpoint.format import MANIFEST, Manifest, load_manifest, step_of
from training.checkpoint.safetensors_file import Damaged, decode
from training.errors import Exit
from training.storage import name_of

if TYPE_CHECKING:
    from tests.simulation.trainer.hosts import Host
    from tests.simulation.trainer.model import State
    from tests.simulation.trainer.world import World

RUN = "gs://bucket/runs/run"
CHECKPOINTS = f"{RUN}/checkpoints/"
SECOND_SIGTERM, SECOND_INTERRUPT = 128 + 15, 128 + 2
_NOT_GONE_ON_FROM = "no step after it is finite"
_CLAIM = re.compile(r"attempt-\d+\.[0-9a-f]+\.json")
_TELEMETRY = re.compile(r"metrics|report\.html|tensorboard|\.end\.json|events|hub|Hub")
_NAMED = re.compile(r"[Hh]osts? \d|this host|worker \d")


@dataclass(frozen=True)
class Claimed:
    """A start's claim of the run."""

    name: str  # of its object
    after: frozenset[str]  # names of the claims that it has seen
    generation: int  # of its object
    commits: int  # that somebody had made or tried to make


class Promises:
    """Watches a life."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ends = EndPromises(world)
        self.violations: list[tuple[str, str]] = []  # names of promises, and what was seen
        self.newest_whole = 0
        self.claims: dict[str, Claimed] = {}  # by the labels of groups, in the order in which they were written
        # (group label, step) of manifests in the order in which they were written, or found to be there.
        self.commits: list[tuple[str, int]] = []
        self._late_commits: dict[str, str] = {}  # manifests that were written after their parts were deleted: by whom
        self._overtaken: set[str] = set()  # these, and those whose parts were deleted just then
        self._committed_at = 0.0  # seconds; the newest commit
        self._commit_times: dict[str, float] = {}  # of groups' newest commits
        self._fenced_by: dict[str, str] = {}  # group label -> label of the start that goes before it
        self.refused_start = False  # the world destroyed all checkpoints, or somebody else started the run

    def broken(self, promise: str, what: str) -> None:
        """Notes a violation."""
        self._world.scheduler.note(f"BROKEN: {promise}: {what}")
        self.violations.append((promise, what))

    # --- storage

    def object_changed(self, url: str, before: Stored | None, after: Stored | None, by: str) -> None:
        """An object was written or deleted."""
        if url.startswith(CHECKPOINTS):
            self.a_commit_is_whole_or_gone(url, before, after, by)
            if name_of(url) == MANIFEST and after is not None and by != "world":
                self.one_winner_a_step(url, before, by)
                self.what_is_committed_is_whole_finite_and_right(url, by)
                self.only_the_newest_start_commits(url, by)
                self.a_commit_begins_with_a_look(url, after, by)
                if (manifest := self._manifest(after)) and self._is_whole(manifest.step):
                    self.ends.a_checkpoint_counts_what_was_skipped(url, manifest.step, manifest.state, by)
                self._committed_at = self._commit_times[by.partition(".")[0]] = self._world.scheduler.now
            self.newest_commit_never_goes_back(url, by)
        elif after is not None and before is None and _CLAIM.fullmatch(name_of(url)):
            label = by.partition(".")[0]
            older = json.loads(after.data).get("after", [])
            self._world.group(label).claimed = self._world.scheduler.now
            self.claims[label] = Claimed(name_of(url), frozenset(older), after.generation, len(self.commits))
        elif after is not None and by != "world":
            if name_of(url) == "summary.json":
                self.summary_is_json(url, after)
            self.ends.object_written(url, after, by)

    def write_refused(self, url: str, by: str) -> None:
        """A create-only write of what was there already."""
        if url.startswith(CHECKPOINTS) and name_of(url) == MANIFEST:
            self.only_the_newest_start_commits(url, by)

    def one_winner_a_step(self, url: str, before: Stored | None, by: str) -> None:
        """A commit is never replaced by another, unless it was damaged."""
        if before is not None and self._is_whole(_step_of(url)):
            self.broken("one winner a step", f"{by} replaced {url}, which {before.writer} had committed")

    def what_is_committed_is_whole_finite_and_right(self, url: str, by: str) -> None:
        """At the moment of a commit all parts are there, and hold exactly the state after that many steps: each record
        once in each epoch. Unless a newer start has taken the parts for abandoned ones, while the commit was on its
        way: it has newer checkpoints then, and the commit is taken back."""
        why = self._difference(_step_of(url))
        if why and self._is_overtaken(url, by):
            self._late_commits[url] = by
            self._overtaken.add(url)
        elif why:
            self.broken("what is committed is whole, finite and right", f"{by} committed {url}, but {why}")

    def _is_overtaken(self, url: str, by: str) -> bool:
        """Whether a checkpoint is an older start's, of a step that a newer one has passed, which takes its parts for
        abandoned ones."""
        label = by.partition(".")[0]
        newer = label in self.claims and any(self.goes_before(newer, label) for newer in self.claims)
        return newer and _step_of(url) < self.newest_whole

    def only_the_newest_start_commits(self, url: str, by: str) -> None:
        """No two groups commit into one run: after a newer start's claim, an older group ends with at most the commit
        that was under way."""
        label = by.partition(".")[0]
        self.commits.append((label, _step_of(url)))
        if label not in self.claims:
            self.broken("only the newest start commits", f"{by} committed {url} without a claim")
            return
        for other in self.claims:
            mine, theirs = (self._commits_since_both(label, other, group) for group in (label, other))
            if self.goes_before(other, label) and len(mine) > 1:
                self.broken(
                    "only the newest start commits",
                    f"group {label} committed steps {mine} after group {other} had claimed the run",
                )
            if other != label and min(len(mine), len(theirs)) > 1:
                self.broken(
                    "only the newest start commits", f"groups {label} and {other} both commit: {mine}, {theirs}"
                )

    def goes_before(self, newer: str, older: str) -> bool:
        """Whether a start has seen another one's claim before it made its own."""
        return self.claims[older].name in self.claims[newer].after

    def _commits_since_both(self, one: str, other: str, group: str) -> set[int]:
        """The steps that a group has committed, or meant to, since two starts had both claimed the run."""
        since = max(self.claims[one].commits, self.claims[other].commits)
        return {step for label, step in self.commits[since:] if label == group}

    def a_commit_begins_with_a_look(self, url: str, stored: Stored, by: str) -> None:
        """Host 0 looks for newer starts when all parts are written: one that was there by then is seen."""
        label, objects = by.partition(".")[0], self._world.bucket.objects
        parts = [objects.get(url.rpartition("/")[0] + "/" + name) for name in self._part_names(stored)]
        last = max((part.generation for part in parts if part is not None and part.writer != "world"), default=0)
        for newer, claim in self.claims.items():
            if label in self.claims and self.goes_before(newer, label) and claim.generation < last:
                self.broken("a commit begins with a look", f"{by} committed {url}, and {newer} had claimed the run")

    def a_commit_is_whole_or_gone(self, url: str, before: Stored | None, after: Stored | None, by: str) -> None:
        """No part that a manifest names is deleted or written again: a half-deleted checkpoint is no checkpoint. Unless
        the manifest came late, when a newer start had listed the parts as abandoned ones."""
        manifest = self._world.bucket.objects.get(url.rpartition("/")[0] + "/" + MANIFEST)
        is_part = name_of(url) != MANIFEST and by != "world"
        if is_part and before is not None and manifest is not None and name_of(url) in self._part_names(manifest):
            if self._is_overtaken(url, manifest.writer):
                self._overtaken.add(url.rpartition("/")[0] + "/" + MANIFEST)
                return
            verb = "deleted" if after is None else "wrote again"
            self.broken("a commit is whole or gone", f"{by} {verb} {url}, which a manifest names")

    def newest_commit_never_goes_back(self, url: str, by: str) -> None:
        """The newest whole checkpoint never becomes an older one by what a program does."""
        newest = self.find_whole()[0]
        if newest < self.newest_whole and by != "world":
            self.broken(
                "the newest commit never goes back",
                f"it was step {self.newest_whole} and is {newest}, after {by} changed {url}",
            )
        self.newest_whole = newest

    def summary_is_json(self, url: str, stored: Stored) -> None:
        """summary.json has no NaN."""

        def refuse(name: str) -> None:
            self.broken("summary.json is JSON", f"{url} has {name}")

        json.loads(stored.data, parse_constant=refuse)

    # --- states

    def state_is_right(self, host: Host, step: int, state: State) -> None:
        """What a host restored is the state after exactly so many steps."""
        noticed = [generation for generation, (rotten, _) in self._world.hidden_rot.items() if rotten > step]
        for generation in noticed:
            del self._world.hidden_rot[generation]
        self.suspects_are_passed_over(step)
        self.newest_whole = self.find_whole()[0] if noticed or self._world.suspects else self.newest_whole
        expected = self._world.curriculum.states[step]
        for name, array in expected.items():
            if not np.array_equal(state[name], array):
                self.broken(
                    "what restores is whole and finite", f"{host.name} begins at step {step} with another {name}"
                )
                return

    def suspects_are_passed_over(self, restored: int) -> None:
        """A restore may go back before a checkpoint whose next step was not finite: it is as good as damaged then, and
        no longer once a restore takes it after all."""
        world = self._world
        world.given_up |= {generation for generation, step in world.suspects.items() if step > restored}
        world.given_up.discard(world.generation_of(restored))

    def little_work_is_at_risk(self, host: Host) -> None:
        """By default a run that trains has committed within the last 15 minutes, and the time of some steps."""
        world, group = self._world, host.group
        since = world.scheduler.now - max(group.claimed, self._committed_at)
        if world.plan.every_steps or group.disturbed or world.disturbed or group is not world.groups[-1]:
            return
        if since > 15 * 60 + 6 * world.plan.step_seconds + 60:
            self.broken("a lost host costs minutes", f"{host.name} trains, and the last commit was {since:.0f} s ago")

    def find_whole(self) -> list[int]:
        """The steps whose checkpoints are whole, newest first, and 0, at which every run begins."""
        urls = self._world.bucket.objects
        steps = [_step_of(url) for url in urls if url.startswith(CHECKPOINTS) and name_of(url) == MANIFEST]
        return [*(step for step in sorted(steps, reverse=True) if self._is_whole(step)), 0]

    @property
    def _objects(self) -> dict[str, Stored]:
        """The bucket as far as anybody can know: damage that no restore has met yet is not there."""
        objects, hidden = self._world.bucket.objects, self._world.hidden_rot
        if not hidden:
            return objects
        return {
            url: hidden[stored.generation][1] if stored.generation in hidden else stored
            for url, stored in objects.items()
        }

    def _is_whole(self, step: int) -> bool:
        return self._difference(step) is None

    def _difference(self, step: int) -> str | None:
        """What of a committed checkpoint is not as it must be; None when all is."""
        objects = self._objects
        folder = f"{CHECKPOINTS}step-{step:08d}/"
        stored = objects.get(folder + MANIFEST)
        if stored is not None and stored.generation in {self._world.poisoned_generation, *self._world.given_up}:
            return _NOT_GONE_ON_FROM
        if stored is None:
            return "there is no manifest"
        key = (stored.generation, *(objects[folder + name].generation if folder + name in objects else 0
                for name in self._part_names(stored)))  # fmt: skip
        cache = self._world.differences
        if key not in cache:
            cache[key] = self._compare(step, stored, folder)
        return cache[key]

    def is_deletable(self, step: int) -> bool:
        """Whether retention may have deleted a checkpoint: there is a newer one."""
        return step < self.newest_whole or self._world.rotten

    def _part_names(self, stored: Stored) -> list[str]:
        manifest = self._manifest(stored)
        return [part.name for part in manifest.parts] if manifest else []

    def _manifest(self, stored: Stored) -> Manifest | None:
        cache = self._world.manifests
        if stored.generation not in cache:
            try:
                cache[stored.generation] = load_manifest(stored.data)
            except Damaged:
                cache[stored.generation] = None
        return cache[stored.generation]

    def _compare(self, step: int, stored: Stored, folder: str) -> str | None:
        manifest = self._manifest(stored)
        if manifest is None:
            return "its manifest is damaged"
        if manifest.step != step:
            return f"its manifest is of step {manifest.step}"
        expected = dict(self._world.curriculum.states[step])
        for part in manifest.parts:
            data = self._objects.get(folder + part.name)
            if data is None:
                return f"part {part.name} is missing"
            if (len(data.data), data.crc32c) != (part.size, part.crc32c):
                return f"part {part.name} is not what the manifest says"
            for name, (_, view) in decode(data.data).items():
                if name not in expected:
                    return f"it holds tensor {name} twice, or none such"
                if expected.pop(name).tobytes() != bytes(view):
                    return f"tensor {name} is not that after {step} steps"
        return f"it lacks {', '.join(expected)}" if expected else None

    # --- ends

    def process_ended(self, host: Host) -> None:
        """A process has ended by itself, or was killed."""
        code, message = host.code, " ".join(host.lines)
        if "Traceback" in message:
            self.broken("no traceback", f"{host.name}: {message[-600:]}")
        if code in (137, 143) and not host.shutdown:
            return
        self.exit_codes_are_documented(host, message)
        if code == Exit.LOST_PEER:
            self.lost_peers_are_named(host, message)
        if code == SECOND_SIGTERM:
            self.a_second_sigterm_saves_too(host)
        if code == Exit.SAVED:
            self.saved_means_asked_and_committed(host, message)
        if code == Exit.FINISHED:
            self.finished_means_committed(host)
            self.ends.finished(host)
            self.what_is_left_is_whole(host)
        if code == Exit.BAD_INPUT:
            self.bad_input_is_final(host, message)
            self.a_late_commit_is_taken_back(host)
        if " not finite" in message:
            self.what_was_not_finite_is_recorded(host)
        if code not in (0, 75, 137):
            self.telemetry_stops_nothing(host)

    def exit_codes_are_documented(self, host: Host, message: str) -> None:
        """0, 1, 2, 75, 76; a second signal's; a kill's."""
        if host.code not in (0, 1, 2, 75, 76, 137, SECOND_SIGTERM, *([SECOND_INTERRUPT] if host.interrupted else [])):
            self.broken("exit codes are documented", f"{host.name} exits with {host.code}: {message[-300:]}")
        disturbed = host.group.disturbed or self._world.disturbed or self._world.poisoned is not None
        if host.code == Exit.FAILED and not disturbed:
            self.broken("an undisturbed attempt does not fail", f"{host.name}: {message[-300:]}")

    def lost_peers_are_named(self, host: Host, message: str) -> None:
        """Every wait ends with the missing hosts named; and nobody is lost where nothing happened."""
        if not _NAMED.search(message):
            self.broken("missing hosts are named", f"{host.name}: {message[-300:]}")
        first = host.group.hosts[0]
        blamed = "host 0 did not answer" in message or "host 0 is gone" in message
        if blamed and first.code is None and not first.hurt and not host.hurt:
            self.broken("missing hosts are named", f"{host.name} blames host 0, which is well: {message[-300:]}")
        others_failed = re.search(r"stopped in phase .* with exit code (?!76)", message)
        if not (host.group.disturbed or self._world.disturbed or others_failed or host.group.asked_to_stop):
            self.broken("an undisturbed attempt loses nobody", f"{host.name}: {message[-300:]}")

    def saved_means_asked_and_committed(self, host: Host, message: str) -> None:
        """75 is for who was asked to stop; what it says is committed is."""
        if not host.group.asked_to_stop:
            self.broken("75 means asked to stop", f"{host.name}: {message[-300:]}")
        quick = self._world.plan.step_seconds <= 2 and self._world.plan.compile_seconds < 1
        committed = self._commit_times.get(host.group.label, -1.0)
        asked = min((stop for other in host.group.hosts for stop in other.stops), default=0.0)
        quick = quick and self.newest_whole < self._world.plan.steps and committed < asked
        if "could not stop in good order" in message and quick and not self._is_disturbed(host):
            self.broken("SIGTERM leads to a commit", f"{host.name}: {message[-300:]}")
        match = re.search(r"stopped after step (\d+), which is committed", message)
        if match and int(match[1]) > 0 and int(match[1]) > self.newest_whole and not self._rots_since(host):
            self.broken(
                "75 means committed", f"{host.name} says step {match[1]}, the newest whole is {self.newest_whole}"
            )

    def _is_disturbed(self, host: Host) -> bool:
        """Whether a stop may lack the time for its commit."""
        return host.group.disturbed or host.group.delayed or self._world.disturbed

    def _rots_since(self, host: Host) -> bool:
        """Whether a checkpoint was damaged when the attempt had begun: nobody may have noticed."""
        return self._world.rotten and self._world.rotten_at >= host.group.began

    def a_second_sigterm_saves_too(self, host: Host) -> None:
        """What the engine and the launcher ask for within the time to save is one request. A process that was frozen
        may read the second one when that time is over."""
        taken = self._world.scheduler.now - host.stops[0]
        if host.shutdown and taken < max(self._world.plan.stop_seconds, 30.0):
            self.broken("two SIGTERMs are one request", f"{host.name} left at once, {taken:.0f} s after the first")

    def a_stop_is_agreed_in_the_next_step(self, host: Host, steps: int) -> None:
        """A host that was asked to stop says so in its next step, and starts none after it has read that one's
        result. `steps`: that it has started since, without those in flight."""
        if steps == 3:
            self.broken("a stop is agreed in the next step", f"{host.name} was asked at {host.stops} and trains on")

    def a_stop_takes_no_longer_than_it_may(self, host: Host) -> None:
        """Some seconds after `checkpoint.stop_seconds` a process that was asked to stop has ended."""
        if host.code is None and not host.hurt:
            self.broken("a stop ends in time", f"{host.name} was asked {host.stops} and still runs")

    def who_lost_a_peer_ends(self, host: Host) -> None:
        """Once a process of the attempt has failed, the others end by themselves."""
        if host.worker and host.code is None and not host.hurt and not host.group.hosts[0].hurt:
            self.broken("every wait ends", f"{host.name} still runs, though the attempt ended: {host.group.codes}")

    def finished_means_committed(self, host: Host) -> None:
        """0 is for who committed the last step."""
        if self.newest_whole < self._world.plan.steps and not self._rots_since(host):
            self.broken("0 means finished", f"{host.name} exits with 0, the newest whole step is {self.newest_whole}")

    def what_is_left_is_whole(self, host: Host) -> None:
        """An attempt that has finished leaves no checkpoint that it has found damaged: it was replaced or deleted. One
        that is whole, and can't be gone on from, may lie before those that it has looked at."""
        world = self._world
        if world.disturbed or self._rots_since(host) or host.group is not world.groups[-1]:
            return
        for url in world.bucket.objects:
            is_manifest = url.startswith(CHECKPOINTS) and name_of(url) == MANIFEST
            why = self._difference(_step_of(url)) if is_manifest and url not in self._overtaken else None
            if why and why != _NOT_GONE_ON_FROM:
                self.broken("what is left is whole", f"{host.name} has finished, and of {url} {why}")

    def a_late_commit_is_taken_back(self, host: Host) -> None:
        """Who was fenced leaves no manifest whose parts are gone."""
        fenced = any("was started again" in line for line in host.lines)
        for url, by in self._late_commits.items():
            stored = self._world.bucket.objects.get(url)
            if fenced and by == _writer_of(stored) == host.name and not self._world.disturbed:
                self.broken("a late commit is taken back", f"{host.name} ends, and {url} is there without its parts")

    def what_was_not_finite_is_recorded(self, host: Host) -> None:
        """No host leaves for a step that was not finite before host 0 has recorded that, or has said why not."""
        group, first = host.group, host.group.hosts[0]
        killed = any(other.hurt or other.code in (137, 143) for other in group.hosts) or group.asked_to_stop
        excused = killed or self._world.disturbed or any("is not recorded" in line for line in first.lines)
        names = (url for url, stored in self._world.bucket.objects.items() if stored.writer == first.name)
        if host.code == Exit.FAILED and not excused and not any(name.endswith(".nonfinite.json") for name in names):
            self.broken("what was not finite is recorded", f"{host.name} ends before host 0 has recorded it")

    def bad_input_is_final(self, host: Host, message: str) -> None:
        """2 means never again: only for who was fenced by a newer start, or where all checkpoints are destroyed."""
        fence = re.search(r"was started again .*?(attempt-\d+\.[0-9a-f]+\.json)", message)
        if fence:
            self.one_of_several_starts_goes_on(host.group.label, fence[1])
            return
        if self._world.hidden_rot:
            self._world.hidden_rot.clear()
            self.newest_whole = self.find_whole()[0]
        lost = "none of the checkpoints" in message and self.find_whole() == [0] and self._world.damaged
        refused = "trying again changes nothing" in message and self._world.refuses(host.group)
        if not lost and not refused:
            self.broken("2 means never again", f"{host.name}: {message[-400:]}")

    def one_of_several_starts_goes_on(self, label: str, name: str) -> None:
        """A start ends for another one that is newer, or was made at the same moment; never all of them for each
        other."""
        newer = next((group for group, claim in self.claims.items() if claim.name == name), label)
        if newer == label or self.goes_before(label, newer):
            self.broken("one of several starts goes on", f"group {label} ended for group {newer}, which is older")
        self._fenced_by[label] = newer
        while newer in self._fenced_by:
            newer = self._fenced_by[newer]
            if newer == label:
                self.broken("one of several starts goes on", f"each ended for another one: {self._fenced_by}")
                return

    def telemetry_stops_nothing(self, host: Host) -> None:
        """No process ends because of metrics, reports, records or uploads."""
        errors = [line for line in host.lines if "error:" in line and _TELEMETRY.search(line)]
        if errors:
            self.broken("telemetry stops nothing", f"{host.name} exits with {host.code}: {errors[0][:300]}")


def _writer_of(stored: Stored | None) -> str:
    """The process that wrote an object; "" when it is gone."""
    return stored.writer if stored else ""


def _step_of(url: str) -> int:
    step = step_of(url.rsplit("/", 2)[1])
    assert step is not None, url
    return step
