//! Connections to a Redis server or cluster, with or without TLS.

use std::fs;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo,
    IntoConnectionInfo, RedisConnectionInfo, RedisError, TlsCertificates, Value, cmd,
};
use tokio_rustls::rustls::RootCertStore;

use super::RedisSettings as Settings;
use pharos_os::blocking;

/// The capacity of the queue of commands to send.
const MAX_COMMANDS: usize = 1024;

/// The time limit of the library for a reply of a cluster. Callers use shorter limits.
const REPLY: Duration = Duration::from_secs(15);

/// An authenticated connection. Clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    /// One server.
    Server(MultiplexedConnection),
    /// A cluster.
    Cluster(ClusterConnection),
}

/// A client that can connect.
enum Connector {
    Server(Box<Client>),
    Cluster(Box<ClusterClient>),
}

impl Connection {
    /// Connects and authenticates, each step within `limit`.
    ///
    /// # Errors
    /// A certificate file cannot be used, the server cannot be reached, or it rejects the
    /// credentials.
    pub(super) async fn open(settings: &Settings, limit: Duration) -> Result<Self, String> {
        let files = settings.clone();
        let login = settings.clone();
        let connector = blocking::run(move || connector(&files, limit))
            .await
            .map_err(|error| error.to_string())??;
        let mut connection = match connector {
            Connector::Cluster(client) => {
                Self::Cluster(client.get_async_connection().await.map_err(text)?)
            }
            Connector::Server(client) => {
                let config = AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(limit))
                    .set_response_timeout(None)
                    .set_pipeline_buffer_size(MAX_COMMANDS);
                Self::Server(
                    client
                        .get_multiplexed_async_connection_with_config(&config)
                        .await
                        .map_err(text)?,
                )
            }
        };
        connection.log_in(&login).await?;
        Ok(connection)
    }

    /// Sends a command and waits for the reply.
    ///
    /// # Errors
    /// The connection is lost, or the server refuses the command.
    pub(super) async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        match self {
            Self::Server(connection) => command.query_async(connection).await,
            Self::Cluster(connection) => command.query_async(connection).await,
        }
    }

    /// Returns whether the server still responds, by sending a command without side effects.
    pub(super) async fn answers(&mut self) -> bool {
        match self.send(&cmd("PING")).await {
            Ok(_) => true,
            // A user without permission for PING gets an error reply, which proves the connection
            // too.
            Err(error) => refusal(&error).is_some(),
        }
    }

    /// Authenticates and selects the database, which also proves that the peer is a Redis that
    /// accepts commands. The library could do both, but its errors omit the server's text.
    async fn log_in(&mut self, settings: &Settings) -> Result<(), String> {
        let Settings { user, password, db, .. } = settings;
        let mut commands = Vec::new();
        if matches!(self, Self::Cluster(_)) {
            commands.push(cmd("PING"));
        } else {
            if !password.is_empty() {
                let mut command = cmd("AUTH");
                if !user.is_empty() {
                    command.arg(user);
                }
                command.arg(password);
                commands.push(command);
            }
            let mut command = cmd("SELECT");
            command.arg(*db);
            commands.push(command);
        }
        for command in commands {
            match self.send(&command).await.map_err(text)? {
                Value::Okay | Value::SimpleString(_) => {}
                _ => return Err("unexpected reply to the login commands".to_owned()),
            }
        }
        Ok(())
    }
}

/// Returns the error text of a server that rejected a command; `None` for a connection error.
pub(super) fn refusal(error: &RedisError) -> Option<String> {
    error.code().map(|code| format!("{code} {}", error.detail().unwrap_or_default()))
}

fn text(error: RedisError) -> String {
    refusal(&error).map_or_else(
        || error.to_string(),
        |words| format!("the server rejected the login: {words}"),
    )
}

/// Reads the certificates and creates a client.
fn connector(settings: &Settings, limit: Duration) -> Result<Connector, String> {
    let Settings { host, port, .. } = settings;
    let address = match &settings.tls {
        Some(_) => ConnectionAddr::TcpTls {
            host: host.clone(),
            port: *port,
            insecure: false,
            tls_params: None,
        },
        None => ConnectionAddr::Tcp(host.clone(), *port),
    };
    let login = RedisConnectionInfo::default().set_skip_set_lib_name();
    let info = address.into_connection_info().map_err(text)?.set_redis_settings(login);
    let certificates = settings.tls.as_ref().map(certificates).transpose()?;
    if !settings.cluster {
        let client = match certificates {
            Some(certificates) => Client::build_with_tls(info, certificates),
            None => Client::open(info),
        };
        return client.map(|client| Connector::Server(Box::new(client))).map_err(text);
    }
    cluster(info, certificates, settings, limit)
}

fn cluster(
    info: ConnectionInfo,
    certificates: Option<TlsCertificates>,
    settings: &Settings,
    limit: Duration,
) -> Result<Connector, String> {
    let Settings { user, password, db, .. } = settings;
    // Enough to follow a key to the node that holds it now. The caller bounds the total time.
    let mut builder = ClusterClient::builder([info])
        .retries(2)
        .database_id((*db).into())
        .connection_timeout(limit)
        .response_timeout(REPLY);
    if let Some(certificates) = certificates {
        builder = builder.certs(certificates);
    }
    if !password.is_empty() {
        builder = builder.password(password.clone());
    }
    if !user.is_empty() {
        builder = builder.username(user.clone());
    }
    builder.build().map(|client| Connector::Cluster(Box::new(client))).map_err(text)
}

/// Reads the certificate authorities and the client's certificate, in PEM.
fn certificates(tls: &super::RedisTls) -> Result<TlsCertificates, String> {
    let client_tls = match (&tls.cert, &tls.key) {
        (Some(cert), Some(key)) => {
            Some(ClientTlsConfig { client_cert: read_pem(cert)?, client_key: read_pem(key)? })
        }
        _ => None,
    };
    let root_cert = match &tls.cacert {
        Some(path) => read_pem(path)?,
        None => system_authorities(),
    };
    Ok(TlsCertificates { client_tls, root_cert: Some(root_cert) })
}

fn read_pem(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("cannot read '{}': {error}", path.display()))
}

/// Returns the system's certificate authorities. The library would read them while connecting, on a
/// thread that serves requests.
fn system_authorities() -> Vec<u8> {
    let certificates = rustls_native_certs::load_native_certs().certs.into_iter();
    let usable =
        certificates.filter(|certificate| RootCertStore::empty().add(certificate.clone()).is_ok());
    let pem = usable.map(|certificate| {
        let text = BASE64_STANDARD.encode(certificate);
        format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
    });
    pem.collect::<String>().into_bytes()
}
