//! Opens a store: its address from the command line, credentials from the environment, under the names of each vendor's own
//! tools and of Triton.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};

use super::client::Http;
use crate::cli::{Address, Protocol};

/// How often a request is tried again, and for how long at most, unless the store refuses it.
const RETRIES: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// A store that keys can be listed and read in.
///
/// # Errors
/// The environment or the address says what cannot be used.
pub(super) fn open(address: &Address) -> Result<Arc<dyn ObjectStore>, String> {
    let http = Http::new()?;
    let store = match address.protocol {
        Protocol::S3 => s3(address, http),
        Protocol::Gcs => gcs(address, http),
        Protocol::Azure => azure(address, http),
    };
    store.map_err(|error| format!("'{address}' cannot be used: {error}"))
}

fn retries() -> RetryConfig {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 };
    RetryConfig { backoff, max_retries: RETRIES, retry_timeout: PATIENCE }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// What else the environment says is read by the builder: `AWS_ACCESS_KEY_ID`, `AWS_SESSION_TOKEN` and so on.
fn s3(address: &Address, http: Http) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder =
        AmazonS3Builder::from_env().with_bucket_name(&address.bucket).with_retry(retries()).with_http_connector(http);
    let own = || variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
    if let Some(endpoint) = address.endpoint.clone().or_else(own) {
        builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
    }
    Ok(Arc::new(builder.build()?))
}

/// Credentials: the file of `GOOGLE_APPLICATION_CREDENTIALS`, those of `gcloud`, or of the machine.
fn gcs(address: &Address, http: Http) -> object_store::Result<Arc<dyn ObjectStore>> {
    let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(&address.bucket);
    Ok(Arc::new(builder.with_retry(retries()).with_http_connector(http).build()?))
}

/// `AZURE_STORAGE_KEY` is the account's; the builder knows the other ways.
fn azure(address: &Address, http: Http) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(&address.bucket);
    let account = address.account.clone().or_else(|| variable("AZURE_STORAGE_ACCOUNT"));
    if let Some(account) = account {
        builder = builder.with_account(account);
    }
    if let Some(key) = variable("AZURE_STORAGE_KEY") {
        builder = builder.with_access_key(key);
    }
    let endpoint = variable("AZURE_STORAGE_ENDPOINT").or_else(|| variable("AZURE_ENDPOINT"));
    if let Some(endpoint) = endpoint {
        builder = builder.with_allow_http(endpoint.starts_with("http://"));
    }
    Ok(Arc::new(builder.with_retry(retries()).with_http_connector(http).build()?))
}
