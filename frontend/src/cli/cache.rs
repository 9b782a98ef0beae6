//! The settings of the response cache, in Triton's forms.

use std::path::PathBuf;
use std::time::Duration;

use pharos_engine::cache::{self, Backend, RedisSettings, RedisTls};

/// One `--cache-config`: the cache's name and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    name: CacheName,
    settings: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CacheName {
    Local,
    Redis,
}

const FORM: &str = "allowed are local,size=BYTES and redis,host=HOST,port=PORT, each optionally \
                    with more settings: NAME,KEY=VALUE[,KEY=VALUE...]";

/// Parses one `--cache-config`.
pub(super) fn config(text: &str) -> Result<CacheConfig, String> {
    let mut parts = text.split(',');
    let name = match parts.next().unwrap_or_default() {
        "local" => CacheName::Local,
        "redis" => CacheName::Redis,
        other => return Err(format!("there is no cache '{other}'; {FORM}")),
    };
    let mut settings = Vec::new();
    for part in parts {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("'{part}' is not of the form KEY=VALUE; {FORM}"))?;
        settings.push((key.trim().to_owned(), value.to_owned()));
    }
    Ok(CacheConfig { name, settings })
}

/// Combines all `--cache-config` and the deprecated `--response-cache-byte-size`; `None` without a
/// cache. `variable` looks up an environment variable.
///
/// # Errors
/// Settings contradict each other, or one is missing, unknown or not allowed.
pub(super) fn cache(
    configs: &[CacheConfig],
    byte_size: Option<u64>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<cache::Settings>, String> {
    let Some(first) = configs.first() else {
        let size = byte_size.filter(|size| *size > 0);
        return Ok(size
            .map(|size| cache::Settings { backend: Backend::Local(size), single_flight: false }));
    };
    if byte_size.is_some() {
        let text = "Incompatible flags --response-cache-byte-size and --cache-config both \
                    provided. Please provide one or the other.";
        return Err(text.to_owned());
    }
    if configs.iter().any(|config| config.name != first.name) {
        return Err("found multiple cache configurations, but only a single cache is currently \
                    supported"
            .to_owned());
    }
    let settings = Settings(configs.iter().flat_map(|config| &config.settings).collect());
    let single_flight = settings.parsed("single_flight", super::boolean)?.unwrap_or(false);
    let backend = match first.name {
        CacheName::Local => Backend::Local(local(&settings)?),
        CacheName::Redis => Backend::Redis(redis(&settings, variable)?),
    };
    Ok(Some(cache::Settings { backend, single_flight }))
}

fn local(settings: &Settings<'_>) -> Result<u64, String> {
    settings.only("local", &["size", "single_flight"])?;
    let size = settings.parsed("size", |text| {
        text.parse()
            .ok()
            .filter(|size| *size > 0)
            .ok_or("allowed are whole numbers of bytes from 1")
    })?;
    size.ok_or_else(|| "the cache 'local' requires a size: local,size=BYTES".to_owned())
}

fn redis(
    settings: &Settings<'_>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<RedisSettings, String> {
    let known = [
        "host",
        "port",
        "user",
        "password",
        "db",
        "ttl",
        "timeout_ms",
        "single_flight",
        "cluster",
        "tls_enabled",
        "cacert",
        "cert",
        "key",
    ];
    settings.only("redis", &known)?;
    let port = settings.parsed("port", |text| {
        text.parse().ok().filter(|port| *port > 0).ok_or("allowed are ports from 1 to 65535")
    })?;
    let db = settings
        .parsed("db", |text| text.parse::<u32>().map_err(|_| "allowed are whole numbers from 0"))?;
    let positive = |text: &str| {
        text.parse::<u32>().ok().filter(|n| *n > 0).ok_or("allowed are whole numbers from 1")
    };
    // Triton's environment variables keep passwords off the command line.
    let text = |key: &str, name: &str| {
        settings.get(key).map(str::to_owned).or_else(|| variable(name)).unwrap_or_default()
    };
    Ok(RedisSettings {
        host: settings
            .get("host")
            .filter(|host| !host.is_empty())
            .ok_or("the cache 'redis' requires a host: redis,host=HOST,port=PORT")?
            .to_owned(),
        port: port.unwrap_or(6379),
        user: text("user", "TRITONCACHE_REDIS_USERNAME"),
        password: text("password", "TRITONCACHE_REDIS_PASSWORD"),
        db: db.unwrap_or(0),
        ttl: settings.parsed("ttl", positive)?.map(|seconds| Duration::from_secs(seconds.into())),
        timeout: Duration::from_millis(
            settings.parsed("timeout_ms", positive)?.unwrap_or(100).into(),
        ),
        cluster: settings.parsed("cluster", super::boolean)?.unwrap_or(false),
        tls: redis_tls(settings)?,
    })
}

fn redis_tls(settings: &Settings<'_>) -> Result<Option<RedisTls>, String> {
    let path = |key: &str| settings.get(key).filter(|path| !path.is_empty()).map(PathBuf::from);
    let tls = RedisTls { cacert: path("cacert"), cert: path("cert"), key: path("key") };
    if tls.cert.is_some() != tls.key.is_some() {
        return Err(
            "a client certificate requires both settings, cert=FILE and key=FILE".to_owned()
        );
    }
    let enabled = settings.parsed("tls_enabled", super::boolean)?.unwrap_or(false);
    if !enabled && tls != RedisTls::default() {
        return Err("cacert, cert and key need tls_enabled=true".to_owned());
    }
    Ok(enabled.then_some(tls))
}

/// The settings of one cache; the last of equal keys applies.
struct Settings<'a>(Vec<&'a (String, String)>);

impl Settings<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    fn parsed<T, E: std::fmt::Display>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        parse(value).map(Some).map_err(|allowed| format!("{key} is '{value}'; {allowed}"))
    }

    fn only(&self, name: &str, known: &[&str]) -> Result<(), String> {
        match self.0.iter().find(|(key, _)| !known.contains(&key.as_str())) {
            Some((key, _)) => Err(format!(
                "the cache '{name}' has no setting '{key}'; allowed are {}",
                known.join(", ")
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(texts: &[&str], byte_size: Option<u64>) -> Result<Option<cache::Settings>, String> {
        let configs = texts.iter().map(|text| config(text)).collect::<Result<Vec<_>, _>>()?;
        cache(&configs, byte_size, |name| {
            (name == "TRITONCACHE_REDIS_PASSWORD").then(|| "secret".to_owned())
        })
    }

    #[test]
    fn accepts_tritons_forms() {
        let local = |size, single_flight| {
            Ok(Some(cache::Settings { backend: Backend::Local(size), single_flight }))
        };
        assert_eq!(read(&["local,size=1048576"], None), local(1_048_576, false));
        assert_eq!(read(&["local,size=1", "local,single_flight=true"], None), local(1, true));
        assert_eq!(read(&["local,size=1,size=7"], None), local(7, false));
        assert_eq!(
            (read(&[], Some(9)), read(&[], Some(0)), read(&[], None)),
            (local(9, false), Ok(None), Ok(None))
        );
        let redis = read(
            &["redis,host=h", "redis,port=7000,user=u,db=2", "redis,ttl=60,timeout_ms=20"],
            None,
        );
        let Some(cache::Settings { backend: Backend::Redis(redis), single_flight: false }) =
            redis.unwrap()
        else {
            panic!("no Redis")
        };
        assert_eq!(
            (redis.host.as_str(), redis.port, redis.db, redis.user.as_str()),
            ("h", 7000, 2, "u")
        );
        assert_eq!(
            (redis.ttl, redis.timeout),
            (Some(Duration::from_secs(60)), Duration::from_millis(20))
        );
        assert_eq!(redis.password, "secret");
        assert!(!format!("{redis:?}").contains("secret"));
        let Some(cache::Settings { backend: Backend::Redis(redis), .. }) =
            read(&["redis,host=h,password=own"], None).unwrap()
        else {
            panic!("no Redis")
        };
        assert_eq!((redis.port, redis.password.as_str(), redis.ttl), (6379, "own", None));
        assert_eq!((redis.cluster, redis.tls), (false, None));
        let tls = "redis,host=h,cluster=true,tls_enabled=true,cacert=ca.pem";
        let Some(cache::Settings { backend: Backend::Redis(redis), .. }) =
            read(&[tls], None).unwrap()
        else {
            panic!("no Redis")
        };
        let files = RedisTls { cacert: Some("ca.pem".into()), ..RedisTls::default() };
        assert_eq!((redis.cluster, redis.tls), (true, Some(files)));
    }

    #[test]
    fn errors_list_the_allowed_values() {
        for (texts, byte_size, expected) in [
            (&["disk,size=1"][..], None, &["'disk'", "local,size=BYTES", "redis,host="][..]),
            (&["local,size"], None, &["'size' is not of the form KEY=VALUE"]),
            (&["local,size=big"], None, &["size is 'big'", "whole numbers of bytes"]),
            (&["local,size=0"], None, &["size is '0'"]),
            (&["local,size=-1"], None, &["size is '-1'"]),
            (&["local"], None, &["requires a size"]),
            (&["local,single_flight=true"], None, &["requires a size"]),
            (&["local,size=1,ttl=3"], None, &["no setting 'ttl'", "size, single_flight"]),
            (
                &["local,size=1,single_flight=maybe"],
                None,
                &["single_flight is 'maybe'", "true, false"],
            ),
            (&["redis,port=1"], None, &["requires a host"]),
            (&["redis,host=h,port=0"], None, &["port is '0'", "1 to 65535"]),
            (&["redis,host=h,timeout_ms=0"], None, &["timeout_ms is '0'", "from 1"]),
            (&["redis,host=h,cacert=ca.pem"], None, &["need tls_enabled=true"]),
            (
                &["redis,host=h,tls_enabled=true,cert=c.pem"],
                None,
                &["both settings, cert=FILE and key=FILE"],
            ),
            (&["redis,host=h,cluster=2"], None, &["cluster is '2'"]),
            (
                &["local,size=1", "redis,host=h"],
                None,
                &["found multiple cache configurations, but only a single cache is currently \
                   supported"],
            ),
            (
                &["local,size=1"],
                Some(1),
                &["Incompatible flags --response-cache-byte-size and --cache-config"],
            ),
        ] {
            let message = read(texts, byte_size).unwrap_err();
            for part in expected {
                assert!(message.contains(part), "{texts:?}: no {part:?} in: {message}");
            }
        }
    }
}
