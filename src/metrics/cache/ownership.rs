//! The series that workers of models write: each is removed with the last model that writes it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Cache, SampleError, Series};
use crate::catalog::Kind;
use crate::channel::Definition;
use crate::series::ModelSeries;

impl Cache {
    /// Removes the series of a model version from all views, including those that only its workers wrote. If the
    /// version has been loaded again, the new series remain.
    pub fn model_unloaded(&self, series: &Arc<ModelSeries>) {
        {
            let mut models = self.models.write();
            if models.get(series.model()).is_some_and(|current| Arc::ptr_eq(current, series)) {
                models.remove(series.model());
                self.depart(series);
            }
        }
        self.release(series.release_owned());
    }

    /// Returns the series for a sample of a worker of this model, as [`Cache::resolve`]. It is removed with the last model whose
    /// workers write it; the late sample of an unloaded model creates none.
    ///
    /// # Errors
    /// The errors of [`Cache::resolve`], and [`SampleError::Unloaded`].
    pub(crate) fn resolve_for(&self, model: &ModelSeries, definition: &Definition) -> Result<Arc<Series>, SampleError> {
        if model.has_ended() {
            return self.existing(definition).ok_or_else(|| SampleError::Unloaded(definition.name.clone()));
        }
        let series = self.resolve(definition)?;
        self.own(model, &series);
        Ok(series)
    }

    /// Registers that this model writes a series. Removes the series if the model was unloaded meanwhile and no other writes it.
    pub(crate) fn own(&self, model: &ModelSeries, series: &Arc<Series>) {
        if !model.add_owned(series) && series.cell.owners.load(Ordering::Relaxed) == 0 {
            self.release([Arc::clone(series)]);
        }
    }

    /// Makes the successor an owner of the counters and distributions that the workers of a replaced load wrote, so that they
    /// continue whether or not its workers have written them already. A gauge ends with the workers that set it.
    pub(super) fn continue_owned(&self, series: &ModelSeries, replaced: &ModelSeries) {
        let continuing = replaced.all_owned().into_iter().filter(|owned| owned.spec().kind != Kind::Gauge);
        continuing.for_each(|owned| self.own(series, &owned));
    }

    /// Removes series that no loaded model's workers write any more.
    pub(crate) fn release(&self, released: impl IntoIterator<Item = Arc<Series>>) {
        for series in released {
            let spec = series.spec();
            while let Some(family) = self.registry().family_of(&spec.name, Some(spec.kind)) {
                if family.remove_one(&series) {
                    break;
                }
            }
            if spec.detected {
                self.end_detected(&spec.name, spec.kind);
            }
        }
    }

    /// Returns the series for a sample, if there is one.
    fn existing(&self, definition: &Definition) -> Option<Arc<Series>> {
        let registry = self.registry();
        let family = registry.family_of(&definition.name, definition.kind)?;
        let spec = &family.spec;
        let is_allowed = spec.builtin.is_none() && definition.kind.is_none_or(|kind| kind == spec.kind);
        if is_allowed { family.get(&self.values(spec, definition).ok()?) } else { None }
    }
}
