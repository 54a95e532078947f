//! The engine: one frozen backbone, the adapters that are resident beside it, and sessions that choose among them. It holds no
//! active state: which adapter acts is each session's own.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use weact_core::{Adapter, Backbone, lora::FactorMap};

use crate::{Result, session::Session};

/// A backbone with its resident adapters.
#[derive(Debug)]
pub struct Engine {
    backbone: Arc<Backbone>,
    base_digest: Arc<str>,
    resident: Mutex<BTreeMap<String, Weak<Resident>>>,
}

/// A lease of a resident adapter: it stays on the device until the last handle of it is dropped.
#[derive(Clone, Debug)]
pub struct AdapterHandle(Arc<Resident>);

#[derive(Debug)]
struct Resident {
    base_digest: Arc<str>,
    digest: String,
    factors: FactorMap,
}

impl AdapterHandle {
    /// The adapter's digest.
    pub fn digest(&self) -> &str {
        &self.0.digest
    }

    /// Digest of the backbone beside which it is resident.
    pub fn base_digest(&self) -> &str {
        &self.0.base_digest
    }

    /// The factors by module, on the engine's device: never empty.
    pub fn factors(&self) -> &FactorMap {
        &self.0.factors
    }
}

impl Engine {
    /// An engine over `backbone`, whose weights have the digest `base_digest`.
    pub fn new(backbone: Arc<Backbone>, base_digest: String) -> Self {
        Self { backbone, base_digest: base_digest.into(), resident: Mutex::default() }
    }

    /// The frozen weights.
    pub fn backbone(&self) -> &Arc<Backbone> {
        &self.backbone
    }

    /// Digest of the frozen weights.
    pub fn base_digest(&self) -> &str {
        &self.base_digest
    }

    /// Puts an adapter on the device, or leases the one that is there under the same digest.
    ///
    /// # Errors
    /// If it doesn't fit the backbone; the message counts the modules that don't.
    pub fn make_resident(&self, adapter: &Adapter) -> Result<AdapterHandle> {
        // Entries are whole at every moment, so a thread that died with the lock broke nothing.
        let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = resident.get(adapter.digest()).and_then(Weak::upgrade) {
            return Ok(AdapterHandle(there));
        }
        let factors = adapter.to_device(&self.backbone.config, &self.backbone.device())?;
        let digest = adapter.digest().to_owned();
        let new = Arc::new(Resident { base_digest: self.base_digest.clone(), digest: digest.clone(), factors });
        resident.retain(|_, held| held.strong_count() > 0);
        resident.insert(digest, Arc::downgrade(&new));
        Ok(AdapterHandle(new))
    }

    /// Digests of the adapters that are on the device, in order.
    pub fn resident(&self) -> Vec<String> {
        let resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        resident.iter().filter(|(_, held)| held.strong_count() > 0).map(|(digest, _)| digest.clone()).collect()
    }

    /// A session with an empty context and no active adapter.
    pub fn session(&self) -> Session {
        Session::new(self.backbone.clone(), self.base_digest.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::tests::{golden, perturbed};

    #[test]
    fn a_digest_is_resident_once_and_until_its_last_handle_goes() {
        let (engine, a) = golden("qwen3-tied");
        let b = perturbed(&a);
        let first = engine.make_resident(&a).expect("fits");
        let second = engine.make_resident(&a.clone()).expect("fits");
        assert!(Arc::ptr_eq(&first.0, &second.0));
        assert_eq!(first.factors().len(), 21); // seven projections in three layers
        let other = engine.make_resident(&b).expect("fits");
        assert_eq!(engine.resident().len(), 2);
        drop((first, other));
        assert_eq!(engine.resident(), [a.digest()]);
        let mut session = engine.session();
        session.switch(Some(("plan".parse().expect("legal"), second)));
        assert_eq!(engine.resident(), [a.digest()], "the session holds the last handle");
        session.switch(None);
        assert!(engine.resident().is_empty());
    }

    #[test]
    fn an_adapter_of_another_shape_is_refused_with_a_count_of_its_modules() {
        let (engine, _) = golden("qwen3-tied"); // heads of width 16
        let (_, foreign) = golden("llama"); // of width 12
        let error = engine.make_resident(&foreign).expect_err("does not fit").to_string();
        assert!(error.contains("12 of the adapter's 21 modules"), "{error}");
        assert!(engine.resident().is_empty());
    }
}
