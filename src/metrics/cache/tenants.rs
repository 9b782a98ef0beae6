//! The tenants of requests, as the definition distinguishes them.

use super::Cache;
use crate::catalog::{Catalog, TenantSource};
use crate::tenants::Tenants;
use pharos_base::id::TenantId;

impl Cache {
    /// Checks that a new definition can replace the current one while the server runs.
    ///
    /// # Errors
    /// It assigns requests to tenants by another rule.
    pub fn check_reload(&self, catalog: &Catalog) -> Result<(), String> {
        match self.tenants().map(Tenants::rule) == catalog.tenants() {
            true => Ok(()),
            false => Err("`tenants` has changed, which needs a restart of the server".to_owned()),
        }
    }

    /// Returns where the names of tenants come from; `None` if tenants are not distinguished.
    pub fn tenant_source(&self) -> Option<&TenantSource> {
        self.tenants().map(|tenants| &tenants.rule().source)
    }

    /// Returns the tenant of this name. An empty name means no tenant.
    pub fn tenant(&self, name: &[u8]) -> TenantId {
        self.tenants().map_or_else(TenantId::default, |tenants| tenants.of(name))
    }
}
