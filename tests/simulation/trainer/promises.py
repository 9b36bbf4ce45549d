"""The promises that the trainer must keep whatever happens, one method each. Records each broken promise.

The simulated world knows the correct state after each step, the damage that it did itself, and which process is dead.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np

from tests.simulation.trainer.bucket import Stored
from tests.simulation.trainer.evaluations import EvaluationPromises, RecordPromises
from tests.simulation.trainer.features import FeaturePromises, put_strange_records
from tests.simulation.trainer.plan import KILLED, RUN
from training.checkpoint.format import MANIFEST, Manifest, load_manifest, step_of
from training.checkpoint.tensors import Damaged, decode
from training.errors import Exit
from training.storage import name_of

CHECKPOINTS = f"{RUN}/checkpoints/"
SECOND_SIGTERM, SECOND_INTERRUPT = 128 + 15, 128 + 2
_NOT_GONE_ON_FROM = "no step after it is finite"
_CLAIM = re.compile(r"attempt-\d+\.[0-9a-f]+\.json")
_TELEMETRY = re.compile(r"metrics|report\.html|tensorboard|\.end\.json|events|hub|Hub")
_NAMED = re.compile(r"[Hh]osts? \d|this host|worker \d")


@dataclass(frozen=True)
class Claimed:
    """The claim of a start (see training.distributed.agreement)."""

    name: str  # of the object
    after: frozenset[str]  # names of the claims that it lists
    generation: int  # of the object
    commits: int  # the number of commits, tried ones too, before it


class Promises(EvaluationPromises, RecordPromises, FeaturePromises):
    def __init__(self, world) -> None:
        super().__init__(world)
        self.newest_whole = 0
        self.claims: dict[str, Claimed] = {}  # by group label, in the order of writing
        # (group label, step) of manifests, in the order of writing or of refused writes
        self.commits: list[tuple[str, int]] = []
        self._late_commits: dict[str, str] = {}  # manifest written after its parts were deleted -> writer
        self.overtaken: set[str] = set()  # these manifests, and those whose parts were deleted afterwards
        self._committed_at = 0.0  # seconds; the newest commit
        self._late_steps: Counter[str] = Counter()  # by host, since a commit is due
        self._commit_times: dict[str, float] = {}  # of groups' newest commits
        self._fenced_by: dict[str, str] = {}  # group label -> label of the start with precedence

    # --- storage

    def object_changed(self, url: str, before: Stored | None, after: Stored | None, by: str) -> None:
        """Checks a written or deleted object."""
        if url.startswith(CHECKPOINTS):
            self.a_commit_is_whole_or_gone(url, before, after, by)
            if name_of(url) == MANIFEST and after is not None and by != "world":
                self.one_winner_a_step(url, before, by)
                self.what_is_committed_is_whole_finite_and_right(url, by)
                self.only_the_newest_start_commits(url, by)
                self.a_commit_begins_with_a_look(url, after, by)
                if (manifest := self.manifest(after)) and self._plan.strangers:
                    put_strange_records(self._world, manifest)
                if manifest and self.is_whole(manifest.step):
                    self.a_checkpoint_counts_what_was_skipped(url, manifest.step, manifest.state, by)
                    if not self._is_overtaken(url, by):
                        self.a_checkpoint_knows_the_best(manifest.step, manifest.state, by)
                self._committed_at = self._commit_times[by.partition(".")[0]] = self._world.scheduler.now
            self.newest_commit_never_goes_back(url, before, by)
            if name_of(url) == MANIFEST and after is None and self._was_whole(url, before):
                self.what_is_kept_is_not_deleted(_step_of(url), by)
        elif after is not None and before is None and _CLAIM.fullmatch(name_of(url)):
            label = by.partition(".")[0]
            older = json.loads(after.data).get("after", [])
            group = self._world.group(label)
            group.claimed, group.newest_at_claim = self._world.scheduler.now, self.newest_whole
            self.claims[label] = Claimed(name_of(url), frozenset(older), after.generation, len(self.commits))
        elif after is not None and by != "world":
            if name_of(url) == "summary.json":
                self.summary_is_json(url, after)
            self.other_object_written(url, after, by)

    def write_refused(self, url: str, by: str) -> None:
        """Checks a refused create-only write."""
        if url.startswith(CHECKPOINTS) and name_of(url) == MANIFEST:
            self.only_the_newest_start_commits(url, by)

    def one_winner_a_step(self, url: str, before: Stored | None, by: str) -> None:
        """No commit replaces another that is whole."""
        if before is not None and self.is_whole(_step_of(url)):
            self.broken("one winner a step", f"{by} replaced {url}, which {before.writer} had committed")

    def what_is_committed_is_whole_finite_and_right(self, url: str, by: str) -> None:
        """When a manifest is written, all parts are there, and hold exactly the state after that many steps. The
        exception: a newer start with newer checkpoints has deleted the parts as abandoned, and the commit is undone."""
        why = self._difference(_step_of(url))
        if why and self._is_overtaken(url, by):
            self._late_commits[url] = by
            self.overtaken.add(url)
        elif why:
            self.broken("what is committed is whole, finite and right", f"{by} committed {url}, but {why}")

    def _is_overtaken(self, url: str, by: str) -> bool:
        """Returns whether a checkpoint is of an older start, and of a step that a newer start has passed."""
        label = by.partition(".")[0]
        newer = label in self.claims and any(self.goes_before(newer, label) for newer in self.claims)
        return newer and _step_of(url) < self.newest_whole

    def only_the_newest_start_commits(self, url: str, by: str) -> None:
        """No two groups commit: after a newer start's claim, an older one makes at most the commit under way."""
        label = by.partition(".")[0]
        self.commits.append((label, _step_of(url)))
        if label not in self.claims:
            self.broken("only the newest start commits", f"{by} committed {url} without a claim")
            return
        for other in self.claims:
            since = self.commits[max(self.claims[label].commits, self.claims[other].commits) :]
            mine, theirs = ({step for who, step in since if who == group} for group in (label, other))
            if self.goes_before(other, label) and len(mine) > 1:
                self.broken("only the newest start commits", f"{label} committed {mine} after {other} claimed the run")
            if other != label and min(len(mine), len(theirs)) > 1:
                self.broken("only the newest start commits", f"both {label} and {other} commit: {mine}, {theirs}")

    def goes_before(self, newer: str, older: str) -> bool:
        """Returns whether the claim of one start lists the claim of another."""
        return self.claims[older].name in self.claims[newer].after

    def a_commit_begins_with_a_look(self, url: str, stored: Stored, by: str) -> None:
        """Host 0 checks for newer starts after all parts are written, and sees those that exist by then."""
        label, objects = by.partition(".")[0], self._world.bucket.objects
        parts = [objects.get(url.rpartition("/")[0] + "/" + name) for name in self._part_names(stored)]
        last = max((part.generation for part in parts if part is not None and part.writer != "world"), default=0)
        for newer, claim in self.claims.items():
            if label in self.claims and self.goes_before(newer, label) and claim.generation < last:
                self.broken("a commit begins with a look", f"{by} committed {url}, and {newer} had claimed the run")

    def a_commit_is_whole_or_gone(self, url: str, before: Stored | None, after: Stored | None, by: str) -> None:
        """No part named by a manifest is deleted or written again, unless a newer start had listed it as abandoned."""
        manifest_url = url.rpartition("/")[0] + "/" + MANIFEST
        manifest = self._world.bucket.objects.get(manifest_url)
        if by == "world" or before is None or manifest is None or name_of(url) not in self._part_names(manifest):
            return
        if self._is_overtaken(url, manifest.writer):
            self.overtaken.add(manifest_url)
        else:
            verb = "deleted" if after is None else "wrote again"
            self.broken("a commit is whole or gone", f"{by} {verb} {url}, which a manifest names")

    def newest_commit_never_goes_back(self, url: str, before: Stored | None, by: str) -> None:
        """No program makes the newest whole checkpoint an older one."""
        newest = self.find_whole()[0]
        if before is not None and self._world.hidden_rot.pop(before.generation, None):
            self.newest_whole = newest  # it has noticed
        if newest < self.newest_whole and by != "world":
            why = f"it was step {self.newest_whole} and is {newest}, after {by} changed {url}"
            self.broken("the newest commit never goes back", why)
        self.newest_whole = newest

    def summary_is_json(self, url: str, stored: Stored) -> None:
        """summary.json has no NaN."""

        def refuse(name: str) -> None:
            self.broken("summary.json is JSON", f"{url} has {name}")

        json.loads(stored.data, parse_constant=refuse)

    # --- states

    def state_is_right(self, host, step: int, state) -> None:
        """A host restores exactly the state after `step` steps."""
        self.suspects_are_passed_over(step)
        self._notice_damage(lambda rotten: rotten > step)
        self.newest_whole = self.find_whole()[0] if self._world.suspects else self.newest_whole
        if step < host.group.newest_at_claim and self.is_whole(host.group.newest_at_claim):
            self.broken("the newest is restored", f"{host.name} begins at {step} of {host.group.newest_at_claim} steps")
        for name, array in self._world.curriculum.states[step].items():
            if not np.array_equal(state[name], array):
                self.broken("what restores is whole and finite", f"{host.name} begins at {step} with another {name}")
                return

    def damage_is_told(self, text: str) -> None:
        """A checkpoint of which a host says so counts as damaged from now on, if it is."""
        if damaged := re.search(r"step-(\d+) can't be used", text):
            self._notice_damage(lambda step: step == int(damaged[1]))

    def _notice_damage(self, of: Callable[[int], bool]) -> None:
        """Counts damaged checkpoints of such steps as damaged, because a program has found out."""
        noticed = [generation for generation, (step, _) in self._world.hidden_rot.items() if of(step)]
        for generation in noticed:
            del self._world.hidden_rot[generation]
        self.newest_whole = self.find_whole()[0] if noticed else self.newest_whole

    def suspects_are_passed_over(self, restored: int) -> None:
        """A checkpoint whose next step was not finite counts as damaged while restores pass over it."""
        world = self._world
        world.given_up |= {generation for generation, step in world.suspects.items() if step > restored}
        world.given_up.discard(world.generation_of(restored))

    def little_work_is_at_risk(self, host) -> None:
        """By default, a training run has committed within the last 15 minutes, plus some steps, of any length: the one
        under way, those in flight until host 0's request is read, and those in flight then."""
        world, group = self._world, host.group
        since = world.scheduler.now - max(group.claimed, self._committed_at)
        if self._plan.every_steps or group.disturbed or world.disturbed or group is not world.groups[-1]:
            return
        self._late_steps[host.name] = self._late_steps[host.name] + 1 if since > 15 * 60 + 60 else 0
        if self._late_steps[host.name] > 2 + 2 * self._plan.in_flight:
            self.broken("a lost host costs minutes", f"{host.name} trains, and the last commit was {since:.0f} s ago")

    def find_whole(self) -> list[int]:
        """Returns the steps of whole checkpoints, newest first, and 0, where every run begins."""
        urls = self._world.bucket.objects
        steps = [_step_of(url) for url in urls if url.startswith(CHECKPOINTS) and name_of(url) == MANIFEST]
        return [*(step for step in sorted(steps, reverse=True) if self.is_whole(step)), 0]

    @property
    def _objects(self) -> dict[str, Stored]:
        """Returns the bucket without the damage that no restore has noticed yet."""
        objects, hidden = self._world.bucket.objects, self._world.hidden_rot
        if not hidden:
            return objects
        return {url: hidden.get(each.generation, (0, each))[1] for url, each in objects.items()}

    def _was_whole(self, url: str, before: Stored | None) -> bool:
        """Returns whether the manifest `before`, which is deleted, had been that of a whole checkpoint."""
        with mock.patch.dict(self._world.bucket.objects, {url: before} if before else {}):
            return self.is_whole(_step_of(url))

    def is_whole(self, step: int) -> bool:
        return self._difference(step) is None

    def _difference(self, step: int) -> str | None:
        """Returns what is wrong with a committed checkpoint, or None."""
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

    def _part_names(self, stored: Stored) -> list[str]:
        manifest = self.manifest(stored)
        return [part.name for part in manifest.parts] if manifest else []

    def manifest_of(self, step: int) -> Manifest | None:
        """Returns the manifest of a committed step; None if there is none, or it is damaged."""
        stored = self._objects.get(f"{CHECKPOINTS}step-{step:08d}/{MANIFEST}")
        return self.manifest(stored) if stored else None

    def manifest(self, stored: Stored) -> Manifest | None:
        cache = self._world.manifests
        if stored.generation not in cache:
            try:
                cache[stored.generation] = load_manifest(stored.data)
            except Damaged:
                cache[stored.generation] = None
        return cache[stored.generation]

    def _compare(self, step: int, stored: Stored, folder: str) -> str | None:
        manifest = self.manifest(stored)
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

    def process_ended(self, host) -> None:
        """Checks a process that exited or was killed."""
        code, message = host.code, " ".join(host.lines)
        self.what_is_printed_is_complete(host, message)
        if "Traceback" in message:
            self.broken("no traceback", f"{host.name}: {message[-600:]}")
        self.no_host_waits_for_one_that_left(host)
        if code in (137, 143) and not host.shutdown:
            return
        self.exit_codes_are_documented(host, message)
        if host.worker == 0 and host.group.label in self.claims:
            self.what_host_0_did_is_recorded(host, self.claims[host.group.label].name)
        if code == Exit.LOST_PEER:
            self.lost_peers_are_named(host, message)
        if code == SECOND_SIGTERM:
            self.a_second_sigterm_saves_too(host)
        if code == Exit.SAVED:
            self.saved_means_asked_and_committed(host, message)
        if code == Exit.FINISHED:
            self.finished_means_committed(host)
            self.finished_means_exported(host)
            self.finished_means_evaluated(host)
            self.what_is_left_is_whole(host)
        if code == Exit.BAD_INPUT:
            self.bad_input_is_final(host, message)
            self.a_late_commit_is_taken_back(host)
        if " not finite" in message:
            self.what_was_not_finite_is_recorded(host)
        if code not in (0, 75, 137):
            self.telemetry_stops_nothing(host)
        self.hosts_end_alike(host.group)

    def hosts_end_alike(self, group) -> None:
        """All hosts of an attempt end with codes that say the same. A second Ctrl-C is a kill."""
        codes = {code for code in group.codes if code not in (None, KILLED, SECOND_SIGTERM)}
        excused = group.disturbed or self._world.disturbed or not codes.isdisjoint({Exit.BAD_INPUT, SECOND_INTERRUPT})
        excused |= any("was started again" in line for line in group.hosts[0].lines)  # though a stop may end it sooner
        if codes & {Exit.FINISHED, Exit.SAVED} and len(codes) > 1 and not excused:
            self.broken("hosts end alike", f"group {group.label}: {group.codes}")

    def exit_codes_are_documented(self, host, message: str) -> None:
        """Exit codes are 0, 1, 2, 75, 76, that of a second signal, or that of a kill."""
        if host.code not in (0, 1, 2, 75, 76, 137, SECOND_SIGTERM, *([SECOND_INTERRUPT] if host.interrupted else [])):
            self.broken("exit codes are documented", f"{host.name} exits with {host.code}: {message[-300:]}")
        disturbed = host.group.disturbed or self._world.disturbed or self._world.poisoned is not None
        if host.code == Exit.FAILED and not disturbed:
            self.broken("an undisturbed attempt does not fail", f"{host.name}: {message[-300:]}")

    def lost_peers_are_named(self, host, message: str) -> None:
        """A process that lost a peer names it, and none is lost without a fault."""
        if not _NAMED.search(message):
            self.broken("missing hosts are named", f"{host.name}: {message[-300:]}")
        first = host.group.hosts[0]
        blamed = "host 0 did not answer" in message or "host 0 is gone" in message
        if blamed and first.code is None and not first.hurt and not host.hurt:
            self.broken("missing hosts are named", f"{host.name} blames host 0, which is well: {message[-300:]}")
        others_failed = re.search(r"stopped in phase .* with exit code (?!76)", message)
        if not (host.group.disturbed or self._world.disturbed or others_failed or host.group.asked_to_stop):
            self.broken("an undisturbed attempt loses nobody", f"{host.name}: {message[-300:]}")

    def saved_means_asked_and_committed(self, host, message: str) -> None:
        """Only a process that was asked to stop exits with 75, and the checkpoint that it names is committed."""
        if not host.group.asked_to_stop:
            self.broken("75 means asked to stop", f"{host.name}: {message[-300:]}")
        quick = self._plan.step_seconds <= 2 and self._plan.compile_seconds < 1
        committed = self._commit_times.get(host.group.label, -1.0)
        asked = min((stop for other in host.group.hosts for stop in other.stops), default=0.0)
        quick = quick and self.newest_whole < self._plan.steps and committed < asked
        if "could not stop in good order" in message and quick and not self._is_disturbed(host):
            self.broken("SIGTERM leads to a commit", f"{host.name}: {message[-300:]}")
        match = re.search(r"stopped after step (\d+), which is committed", message)
        if match and int(match[1]) > 0 and int(match[1]) > self.newest_whole and not self._rots_since(host):
            self.broken("75 means committed", f"{host.name} says step {match[1]}, and it is {self.newest_whole}")

    def _is_disturbed(self, host) -> bool:
        """Returns whether a stop may lack the time for its commit."""
        return host.group.disturbed or host.group.delayed or self._world.disturbed

    def _rots_since(self, host) -> bool:
        """Returns whether a checkpoint was damaged after the attempt began, so that it may not have noticed."""
        return self._world.rotten and self._world.rotten_at >= host.group.began

    def a_second_sigterm_saves_too(self, host) -> None:
        """Requests to stop within the time to save count as one. A process that was frozen may read one later."""
        taken = self._world.scheduler.now - host.stops[0]
        if host.shutdown and taken < max(self._plan.stop_seconds, 30.0):
            self.broken("two SIGTERMs are one request", f"{host.name} left at once, {taken:.0f} s after the first")

    def a_stop_is_agreed_in_the_next_step(self, host, steps: int) -> None:
        """A host asked to stop says so in its next step, the last. `steps`: started since then, not in flight."""
        if steps == 3:
            self.broken("a stop is agreed in the next step", f"{host.name} was asked at {host.stops} and trains on")

    def a_stop_takes_no_longer_than_it_may(self, host) -> None:
        """A process that was asked to stop ends within `checkpoint.stop_seconds` and a margin."""
        if host.code is None and not host.hurt:
            self.broken("a stop ends in time", f"{host.name} was asked {host.stops} and still runs")

    def a_first_step_that_blocks_is_ended(self, host) -> None:
        """A process whose first collective never returns ends within the limit, and one of the group says why."""
        lines = [line for each in host.group.hosts for line in each.lines]
        if host.code is None or not any("the first step took longer than" in line for line in lines):
            self.broken("a first step that blocks is ended", f"{host.name} ends with {host.code}: {lines[-3:]}")

    def a_process_that_lost_a_peer_ends(self, host) -> None:
        """After a process of the attempt has failed, the others end by themselves."""
        if host.worker and host.code is None and not host.hurt and not host.group.hosts[0].hurt:
            self.broken("every wait ends", f"{host.name} still runs, though the attempt ended: {host.group.codes}")

    def no_host_waits_for_one_that_left(self, host) -> None:
        """A host ends soon after another one has left in good order: at once at the start, without a kill later."""
        group = host.group
        left = min((each.ended for each in group.hosts if each.code == Exit.SAVED), default=host.ended)
        is_late = host.ended - left > 12 and (host.code == KILLED or group.claimed == float("inf"))
        if is_late and host.joined < left and not self._is_disturbed(host):
            self.broken("no host waits for one that left", f"{host.name} ends {host.ended - left:.0f} s after it")

    def finished_means_committed(self, host) -> None:
        """Only a process whose run committed the last step exits with 0."""
        if self.newest_whole < self._plan.steps and not self._rots_since(host):
            self.broken("0 means finished", f"{host.name} exits with 0, the newest whole step is {self.newest_whole}")

    def what_is_left_is_whole(self, host) -> None:
        """A finished attempt has replaced or deleted each checkpoint that it read and found damaged."""
        world = self._world
        if world.disturbed or self._rots_since(host) or host.group is not world.groups[-1]:
            return
        for url in world.bucket.objects:
            is_manifest = url.startswith(CHECKPOINTS) and name_of(url) == MANIFEST
            why = self._difference(_step_of(url)) if is_manifest and url not in self.overtaken else None
            if why and why != _NOT_GONE_ON_FROM:
                self.broken("what is left is whole", f"{host.name} has finished, and of {url} {why}")

    def a_late_commit_is_taken_back(self, host) -> None:
        """A fenced process leaves no manifest without its parts."""
        fenced = any("was started again" in line for line in host.lines)
        for url, by in self._late_commits.items():
            stored = self._world.bucket.objects.get(url)
            left = stored is not None and by == stored.writer == host.name
            if fenced and left and not self._world.disturbed:
                self.broken("a late commit is taken back", f"{host.name} ends, and {url} is there without its parts")

    def what_was_not_finite_is_recorded(self, host) -> None:
        """No host exits because of a step that was not finite before host 0 has recorded it, or said why not."""
        group, first = host.group, host.group.hosts[0]
        killed = any(other.hurt or other.code in (137, 143) for other in group.hosts) or group.asked_to_stop
        excused = killed or self._world.disturbed or any("is not recorded" in line for line in first.lines)
        names = (url for url, stored in self._world.bucket.objects.items() if stored.writer == first.name)
        if host.code == Exit.FAILED and not excused and not any(name.endswith(".nonfinite.json") for name in names):
            self.broken("what was not finite is recorded", f"{host.name} ends before host 0 has recorded it")

    def bad_input_is_final(self, host, message: str) -> None:
        """Only a process fenced by a newer start, or whose checkpoints are all damaged, exits with 2 (never retry)."""
        fence = re.search(r"was started again .*?(attempt-\d+\.[0-9a-f]+\.json)", message)
        if fence:
            self.one_of_several_starts_goes_on(host.group.label, fence[1])
            return
        if self._world.hidden_rot:
            self._world.hidden_rot.clear()
            self.newest_whole = self.find_whole()[0]
        lost = "none of the checkpoints" in message and self.find_whole() == [0] and self._world.damaged
        alone = self._world.poisoned_generation > 0 and self.find_whole() == [0]  # all others are damaged
        refused = "trying again changes nothing" in message and (self._world.refuses(host.group) or alone)
        if not lost and not refused:
            self.broken("2 means never again", f"{host.name}: {message[-400:]}")

    def one_of_several_starts_goes_on(self, label: str, name: str) -> None:
        """A start ends because of a newer or simultaneous one; starts never end each other in a circle."""
        newer = next((group for group, claim in self.claims.items() if claim.name == name), label)
        if newer == label or self.goes_before(label, newer):
            self.broken("one of several starts goes on", f"group {label} ended for group {newer}, which is older")
        self._fenced_by[label] = newer
        while newer in self._fenced_by:
            newer = self._fenced_by[newer]
            if newer == label:
                self.broken("one of several starts goes on", f"each ended for another one: {self._fenced_by}")
                return

    def telemetry_stops_nothing(self, host) -> None:
        """No process ends because of metrics, reports, records or uploads."""
        errors = [line for line in host.lines if "error:" in line and _TELEMETRY.search(line)]
        if errors:
            self.broken("telemetry stops nothing", f"{host.name} exits with {host.code}: {errors[0][:300]}")


def _step_of(url: str) -> int:
    step = step_of(url.rsplit("/", 2)[1])
    assert step is not None, url
    return step
