//! What must hold after each step of a simulation, and at its end.

use std::collections::BTreeMap;
use std::time::Duration;

use pharos::metrics::builtin::Builtin;
use pharos::metrics::exposition::{Format, render};
use pharos::metrics::statistics;

use super::models::{Counted, Instance, QUEUE_DELAY_US};
use super::world::World;

/// How often counters are compared with their values before, in moments.
const COUNTERS_EVERY: u64 = 400;

impl World {
    /// Checks a batch that a process has just received.
    ///
    /// # Errors
    /// It is larger than the model permits, or has a request that was answered with success.
    pub(super) fn check_batch(
        &mut self,
        model: usize,
        instance: usize,
        number: usize,
    ) -> Result<(), String> {
        let Some(process) = &self.models[model].instances[instance].process else { return Ok(()) };
        let execute = &process.batches[number];
        let values = process.values(execute);
        let rows: usize = values.iter().map(Vec::len).sum();
        let one = &self.models[model];
        if rows > usize::try_from(one.config.max_batch_size.max(1)).unwrap() {
            return Err(format!("a batch of '{}' has {rows} rows", one.name));
        }
        if one.name == "cached" {
            return Ok(());
        }
        let padding =
            |position: usize| one.has_sequences() && execute.requests[position].sequence.is_none();
        for (position, values) in
            values.iter().enumerate().filter(|(position, _)| !padding(*position))
        {
            if one.answered.contains(&values[0]) {
                return Err(format!(
                    "'{}' executes request {position} of a batch again after its answer",
                    one.name
                ));
            }
            let call =
                self.calls.iter_mut().rfind(|call| call.model == model && call.values == *values);
            let executed = match call {
                Some(call) => {
                    call.executed += 1;
                    Some(call.executed)
                }
                None => self.steps.received(model, values).map_err(|()| {
                    format!("'{}' executes the request of a step again after its answer", one.name)
                })?,
            };
            let Some(executed) = executed else {
                return Err(format!(
                    "'{}' executes {values:?}, which no client has sent",
                    one.name
                ));
            };
            self.coverage.executed_again += u64::from(executed > 1);
            if executed > 1 && one.has_sequences() {
                return Err(format!("a step of '{}' is executed twice", one.name));
            }
        }
        Ok(())
    }

    /// Checks what must hold after every step.
    ///
    /// # Errors
    /// What does not hold.
    pub(super) fn check(&mut self) -> Result<(), String> {
        self.check_resources()?;
        self.check_waiting()?;
        self.check_counts()?;
        self.check_ensembles()?;
        self.moments += 1;
        if self.moments.is_multiple_of(COUNTERS_EVERY) {
            self.check_counters()?;
        }
        Ok(())
    }

    /// The rate limiter grants no more than there is, and executing instances hold what they need.
    fn check_resources(&self) -> Result<(), String> {
        let Some(limits) = &self.shared.limits else { return Ok(()) };
        let instances = self.models.iter().flat_map(|model| &model.instances);
        let executing = instances
            .filter(|one| one.process.as_ref().is_some_and(|process| !process.batches.is_empty()));
        let needed: u64 = executing.filter(|one| one.ready).map(|one| u64::from(one.units)).sum();
        for usage in limits.usage() {
            if usage.used > u64::from(usage.total) || needed > usage.used {
                return Err(format!("resources: {usage:?}, and executing instances need {needed}"));
            }
        }
        Ok(())
    }

    /// No request waits longer than its timeout, or while an instance is idle beyond the delay of
    /// batches.
    fn check_waiting(&self) -> Result<(), String> {
        for (number, call) in self.open.iter().map(|number| (*number, &self.calls[*number])) {
            if !call.waits() || call.executed > 0 {
                continue;
            }
            let model = &self.models[call.model];
            let waited = self.now - call.sent;
            // Batches may be on the way to a process that has died.
            let dead = model.instances.iter().any(|one| one.ready && one.process.is_none());
            if let Some(timeout) = call.timeout_us.filter(|_| !dead)
                && waited > Duration::from_micros(timeout + 1)
            {
                return Err(format!(
                    "request {number} waits for {waited:?}, with a timeout of {timeout} us"
                ));
            }
            let free = |one: &Instance| {
                one.ready && one.process.as_ref().is_some_and(|process| process.batches.is_empty())
            };
            let decides =
                self.shared.limits.is_none() && !model.has_sequences() && model.name != "cached";
            if decides
                && !dead
                && waited > Duration::from_micros(QUEUE_DELAY_US + 1)
                && model.instances.iter().any(free)
            {
                return Err(format!(
                    "request {number} to '{}' waits for {waited:?} beside an idle instance",
                    model.name
                ));
            }
        }
        Ok(())
    }

    /// Each request is in the queue, executing, or counted as a success or failure.
    fn check_counts(&self) -> Result<(), String> {
        // Requests that wait for the response to an equal one are nowhere.
        for (number, model) in
            self.models.iter().enumerate().filter(|(_, model)| model.name != "cached")
        {
            let by_clients = self.counted(number);
            let seen = statistics::of(&model.driver.series).inference_stats;
            let counted = seen.success.count + seen.fail.count;
            let unanswered = model.driver.unanswered() as u64;
            // A stream that has ended stays in its batch until the batch ends.
            let most = if model.config.decoupled { counted } else { counted + unanswered };
            let sent = by_clients.sent;
            let refused = by_clients.refused;
            if counted + unanswered + refused < sent || most + refused > sent {
                return Err(format!(
                    "'{}': {counted} counted and {unanswered} unanswered of {sent} requests",
                    model.name
                ));
            }
        }
        Ok(())
    }

    /// Returns what clients and steps of ensembles have seen of a model.
    fn counted(&self, model: usize) -> Counted {
        let mut counted = self.models[model].counted;
        counted.add(&self.steps.counted(model));
        counted
    }

    /// No counter goes backwards, and the numbers of one reading agree.
    fn check_counters(&mut self) -> Result<(), String> {
        let text = render(&self.shared.metrics, Format::Text);
        let counters = counters(&text);
        for (labels, observed) in text.lines().filter_map(observations_of_requests) {
            let succeeded = counters.get(&format!("{}{labels}", Builtin::RequestSuccess.name()));
            if succeeded != Some(&observed) {
                return Err(format!(
                    "{labels}: {observed} durations and {succeeded:?} successful requests"
                ));
            }
        }
        for model in &self.models {
            let seen = statistics::of(&model.driver.series);
            let executions: u64 =
                seen.batch_stats.iter().map(|batch| batch.compute_infer.count).sum();
            if executions != seen.execution_count {
                return Err(format!(
                    "'{}': {executions} executions by size, {} in all",
                    model.name, seen.execution_count
                ));
            }
        }
        for (name, before) in &self.counters {
            match counters.get(name) {
                Some(now) if now >= before => {}
                now => return Err(format!("the counter {name} was {before} and is {now:?}")),
            }
        }
        self.counters = counters;
        Ok(())
    }

    /// Checks that no sequence is left when all requests are answered and the idle time has passed.
    ///
    /// # Errors
    /// What is left.
    pub(super) fn check_sequences(&self) -> Result<(), String> {
        for model in &self.models {
            let Some((counts, _)) = model.driver.sequences() else { continue };
            let left = counts.active + counts.backlogged + counts.slots_used;
            if left > 0 {
                return Err(format!("'{}' has sequences left: {counts:?}", model.name));
            }
        }
        Ok(())
    }

    /// Checks that nothing is left when all requests are answered.
    ///
    /// # Errors
    /// What is left, or does not agree.
    pub(super) fn check_end(&mut self) -> Result<(), String> {
        self.check_counters()?;
        let text = render(&self.shared.metrics, Format::Text);
        let counted: Vec<_> = (0..self.models.len()).map(|number| self.counted(number)).collect();
        for (model, counted) in self.models.iter_mut().zip(counted) {
            let name = model.name;
            if model.driver.unanswered() > 0 {
                return Err(format!("'{name}' has {} requests left", model.driver.unanswered()));
            }
            for one in model.instances.iter_mut().filter(|one| one.ready) {
                let Some(process) = &mut one.process else { continue };
                process.link.release_unused();
                process.read();
                let inputs = process.link.arenas.inputs.used();
                let outputs = process.lent();
                if inputs + outputs > 0 {
                    return Err(format!(
                        "'{name}': {inputs} bytes of inputs and {outputs} of outputs are left"
                    ));
                }
            }
            let labels = format!("{{model=\"{name}\",version=\"1\"}} 0");
            if !text.lines().any(|line| {
                line.strip_prefix(Builtin::PendingRequests.name()) == Some(labels.as_str())
            }) {
                return Err(format!("'{name}' has pending requests in the metrics"));
            }
            let seen = statistics::of(&model.driver.series);
            let succeeded = seen.inference_stats.success.count;
            let failed = seen.inference_stats.fail.count;
            let successes = counted.succeeded..=counted.succeeded + counted.cancelled;
            if !successes.contains(&succeeded)
                || succeeded + failed + counted.refused != counted.sent
            {
                return Err(format!(
                    "'{name}': {succeeded} successes and {failed} failures are counted: \
                     {counted:?}"
                ));
            }
            if seen.execution_count != counted.executions {
                return Err(format!(
                    "'{name}': {} executions are counted: {counted:?}",
                    seen.execution_count
                ));
            }
            self.coverage.hits += seen.inference_stats.cache_hit.count;
            self.coverage.counted.add(&counted);
        }
        let limits = self.shared.limits.iter().flat_map(|limits| limits.usage());
        let left: Vec<_> = limits.filter(|usage| usage.used > 0).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("resources are left in use: {left:?}")) }
    }
}

/// Returns all series of counters in a scrape.
fn counters(text: &str) -> BTreeMap<String, f64> {
    let mut is_counter = false;
    let mut found = BTreeMap::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            is_counter = kind.ends_with(" counter");
        } else if is_counter
            && !line.starts_with('#')
            && let Some((name, value)) = line.rsplit_once(' ')
        {
            found.insert(name.to_owned(), value.parse().unwrap());
        }
    }
    found
}

/// Returns the labels and the number of observations of a line of the histogram of requests.
fn observations_of_requests(line: &str) -> Option<(&str, f64)> {
    let counted = line.strip_prefix(Builtin::RequestHistogram.name())?.strip_prefix("_count")?;
    let (labels, value) = counted.rsplit_once(' ')?;
    Some((labels, value.parse().ok()?))
}
