//! What is registered when the server starts. An archive that cannot be used hides no other.

use std::sync::Arc;

use super::Registry;
use crate::torchserve::{Initial, initial};

impl Registry {
    /// Registers what is to be there at the start. The workers start in the background. Gives what could not be registered,
    /// and why.
    pub async fn load_at_start(self: &Arc<Self>) -> Vec<(String, String)> {
        let mut failed = Vec::new();
        let mut defaults = Vec::new();
        let settings = self.settings.clone();
        let all = tokio::task::spawn_blocking(move || initial(&settings)).await;
        let all = match all.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(all) => all,
            Err(reason) => return vec![("all".to_owned(), reason)],
        };
        for Initial { url, asked, default_version } in all {
            match self.add(&url, asked).await {
                Ok(version) => {
                    version.keep_starting(self);
                    defaults.extend(default_version.then(|| (version.name.clone(), version.text.clone())));
                }
                Err(refused) => failed.push((url, refused.message)),
            }
        }
        for (name, version) in defaults {
            if let Err(refused) = self.set_default(&name, &version) {
                tracing::warn!("{refused}");
            }
        }
        failed
    }
}
