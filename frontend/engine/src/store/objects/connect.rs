//! Opens a store: its address comes from the command line, its credentials from the environment,
//! under the names used by each vendor's tools and by Triton.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{BackoffConfig, RetryConfig};

use super::ModelStore;
use super::credentials::Credentials;
use super::http_client::Http;
use crate::store::address::{Address, Protocol};

/// The number of retries of a failed request. Resuming an interrupted answer counts as a retry too,
/// so the time since the first attempt is not a useful limit.
const RETRIES: usize = 3;
const RETRY_TIMEOUT: Duration = Duration::from_secs(3600);

type Connected = Result<Arc<dyn ModelStore>, String>;

/// Opens a store whose keys can be listed and read.
///
/// # Errors
/// The environment or the address has invalid settings.
pub(super) fn connect(address: &Address) -> Connected {
    let http = Http::new()?;
    let credentials = match variable("TRITON_CLOUD_CREDENTIAL_PATH") {
        Some(path) => Credentials::read(Path::new(&path))?,
        None => Credentials::default(),
    };
    let store = match address.protocol {
        Protocol::S3 => s3(address, http, &credentials),
        Protocol::Gcs => gcs(address, http, &credentials),
        Protocol::Azure => azure(address, http, &credentials),
    };
    store.map_err(|error| format!("'{address}' cannot be used: {error}"))
}

fn retries() -> RetryConfig {
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(5),
        base: 2.0,
    };
    RetryConfig { backoff, max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn given(value: &str) -> Option<&str> {
    Some(value).filter(|value| !value.is_empty())
}

/// The builder reads other variables: `AWS_ACCESS_KEY_ID`, `AWS_SESSION_TOKEN` and so on.
fn s3(address: &Address, http: Http, credentials: &Credentials) -> Connected {
    let endpoint = address
        .endpoint
        .clone()
        .or_else(|| variable("AWS_ENDPOINT_URL_S3"))
        .or_else(|| variable("AWS_ENDPOINT_URL"));
    let mut builder = match credentials.s3(&address.to_string()) {
        Some(secret) if !secret.profile.is_empty() => {
            return Err(format!(
                "profile '{}' is not supported: give its key_id and secret_key",
                secret.profile
            ));
        }
        Some(secret) => {
            let mut builder = AmazonS3Builder::new();
            if let (Some(id), Some(key)) = (given(&secret.key_id), given(&secret.secret_key)) {
                builder = builder.with_access_key_id(id).with_secret_access_key(key);
            }
            if let Some(token) = given(&secret.session_token) {
                builder = builder.with_token(token);
            }
            let region = given(&secret.region).map(str::to_owned);
            builder.with_region(
                region.or_else(|| variable("AWS_DEFAULT_REGION")).unwrap_or("us-east-1".to_owned()),
            )
        }
        None => AmazonS3Builder::from_env(),
    };
    if let Some(endpoint) = endpoint {
        builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
    }
    builder =
        builder.with_bucket_name(&address.bucket).with_retry(retries()).with_http_connector(http);
    Ok(Arc::new(builder.build().map_err(|error| error.to_string())?))
}

/// Credentials come from the file of `GOOGLE_APPLICATION_CREDENTIALS`, from `gcloud`, or from the
/// machine.
fn gcs(address: &Address, http: Http, credentials: &Credentials) -> Connected {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(&address.bucket);
    if let Some(path) = credentials.gs(&address.to_string()) {
        builder = builder.with_application_credentials(path);
    }
    builder = builder.with_retry(retries()).with_http_connector(http);
    Ok(Arc::new(builder.build().map_err(|error| error.to_string())?))
}

/// `AZURE_STORAGE_ACCOUNT` is used only if the address names no account. The builder supports more
/// credentials than keys.
fn azure(address: &Address, http: Http, credentials: &Credentials) -> Connected {
    let secret = credentials.azure(&address.to_string()).unwrap_or_default();
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(&address.bucket);
    let account = address.account.clone().or_else(|| variable("AZURE_STORAGE_ACCOUNT"));
    if let Some(account) = account.or_else(|| given(&secret.account_str).map(str::to_owned)) {
        builder = builder.with_account(account);
    }
    let key = given(&secret.account_key).map(str::to_owned);
    if let Some(key) = key.or_else(|| variable("AZURE_STORAGE_KEY")) {
        builder = builder.with_access_key(key);
    }
    let endpoint = variable("AZURE_STORAGE_ENDPOINT").or_else(|| variable("AZURE_ENDPOINT"));
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        builder = builder.with_allow_http(true);
    }
    builder = builder.with_retry(retries()).with_http_connector(http);
    Ok(Arc::new(builder.build().map_err(|error| error.to_string())?))
}
