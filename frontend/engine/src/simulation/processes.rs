//! What simulated processes do, with faults: they take batches, execute them, and reply late,
//! twice, wrongly or never.

use pharos::wire::{Done, Response};

use super::worker::Step;
use super::world::{Event, Place, World};

/// The time that a batch takes, in microseconds.
const SERVICE_US: u64 = 2_000;

impl World {
    /// Lets a process read its frames, and begins its next batch. Returns whether there were any.
    ///
    /// # Errors
    /// A batch is larger than the model permits, or has a request that was answered.
    pub(super) fn read_frames(&mut self, model: usize, instance: usize) -> Result<bool, String> {
        let one = &mut self.models[model].instances[instance];
        let Some(process) = &mut one.process else { return Ok(false) };
        let idle = process.batches.is_empty();
        let count = process.read();
        if process.goes_on() {
            let place = self.place(model, instance);
            self.after(1, Event::Done(place));
        }
        if count == 0 {
            return Ok(false);
        }
        let Some(process) = &self.models[model].instances[instance].process else {
            return Ok(false);
        };
        let first = process.batches.len() - count;
        for number in first..process.batches.len() {
            self.check_batch(model, instance, number)?;
        }
        if idle {
            self.begin(model, instance);
        }
        Ok(true)
    }

    /// Plans the end of the first batch of a process.
    fn begin(&mut self, model: usize, instance: usize) {
        let place = self.place(model, instance);
        let decoupled = self.models[model].config.decoupled;
        if let Some(process) =
            self.models[model].instances[instance].process.as_mut().filter(|_| decoupled)
        {
            process.begin_streams();
        }
        if self.random.chance(self.faults.hang) {
            // The execution timeout ends it.
            self.coverage.hung += 1;
            return;
        }
        let mut time = SERVICE_US / 4 + self.random.below(SERVICE_US);
        if self.random.chance(self.faults.late) {
            time *= 40;
        }
        let dies = self.random.chance(self.faults.die);
        self.after(time, if dies { Event::Die(place) } else { Event::Done(place) });
    }

    /// A process has executed its first batch.
    ///
    /// # Errors
    /// A step of a sequence was executed in the wrong process.
    pub(super) fn batch_done(&mut self, place: Place) -> Result<(), String> {
        if self.models[place.model].config.decoupled {
            return self.next_response(place);
        }
        let now = self.now;
        let sequences = self.models[place.model].has_sequences();
        let fails = !sequences && self.random.chance(self.faults.fail);
        let fails_whole = fails && self.random.chance(2);
        let Some(one) = self.instance(place) else { return Ok(()) };
        let (id, Some(process)) = (one.id, &mut one.process) else { return Ok(()) };
        let done = if fails_whole {
            process.fail(now)
        } else {
            let failed: &[u32] = if fails { &[0] } else { &[] };
            process.execute(sequences, failed, now)?
        };
        let goes_on = !process.batches.is_empty();
        let link = process.link.clone();
        let driver = self.models[place.model].driver.clone();
        let again = self
            .random
            .chance(self.faults.double)
            .then(|| Done { outputs: Vec::new(), ..done.clone() });
        driver.batch_done(id, &link, done);
        self.models[place.model].counted.executions += 1;
        if let Some(again) = again {
            self.coverage.doubled_replies += 1;
            driver.batch_done(id, &link, again.clone());
            driver.batch_done(id, &link, Done { batch: u64::MAX, ..again });
        }
        if goes_on {
            self.begin(place.model, place.instance);
        }
        Ok(())
    }

    /// A process of the decoupled model sends its next response, or ends its first batch.
    fn next_response(&mut self, place: Place) -> Result<(), String> {
        let now = self.now;
        let fails = self.random.chance(self.faults.fail);
        let fails_whole = fails && self.random.chance(4);
        let choice = self.random.below(64);
        let driver = self.models[place.model].driver.clone();
        let Some(one) = self.instance(place) else { return Ok(()) };
        let (id, ready, Some(process)) = (one.id, one.ready, &mut one.process) else {
            return Ok(());
        };
        let link = process.link.clone();
        let step = if fails_whole { Step::End } else { process.next_step(choice, fails, now) };
        match step {
            Step::Respond(response) => {
                let again =
                    response.last.then(|| Response { outputs: Vec::new(), ..response.clone() });
                driver
                    .response(id, &link, response)
                    .map_err(|error| format!("a response is refused: {error}"))?;
                self.coverage.responses += 1;
                let mut dies = self.random.chance(8 * self.faults.die);
                if let Some(again) = again.filter(|_| self.random.chance(self.faults.double)) {
                    self.coverage.doubled_replies += 1;
                    if driver.response(id, &link, again).is_ok() && ready {
                        return Err("a response after the last one is accepted".to_owned());
                    }
                    // The frontend replaces it.
                    dies = true;
                }
                let pause = 20 + self.random.below(400);
                self.after(pause, if dies { Event::Die(place) } else { Event::Done(place) });
            }
            Step::Wait => self.coverage.waits += 1,
            Step::End => {
                let done = if fails_whole { process.fail(now) } else { process.end_streams(now) };
                let goes_on = !process.batches.is_empty();
                driver.batch_done(id, &link, done);
                self.models[place.model].counted.executions += 1;
                if goes_on {
                    self.begin(place.model, place.instance);
                }
            }
        }
        Ok(())
    }

    /// What supervision does from time to time: see `crate::supervisor`.
    pub(super) fn tick(&mut self) {
        let now = self.now;
        for (model, instance) in self.places() {
            let driver = self.models[model].driver.clone();
            let one = &mut self.models[model].instances[instance];
            if let Some(process) = &one.process {
                process.link.release_unused();
            }
            one.machine.execution_finished(now);
            if let Some(since) = driver.executing_since(one.id) {
                one.machine.execution_started(since);
            }
        }
    }
}
