//! A session: one retained context, the adapter that is active over it, and what the active weights have computed of it.

use std::{collections::BTreeSet, sync::Arc};

use burn::tensor::{DType, Tensor};
use weact_core::{
    Backbone, Capability,
    episode::Usage,
    lora::FactorMap,
    model::{Config, KvCache},
};

use crate::{Error, Result, engine::AdapterHandle, sampler::Choose};

/// Positions computed in one pass, so that scores grow with the context and not with its square.
const CHUNK: usize = 512;

/// One conversation under switchable weights.
///
/// Invariant: a cache is read only under the digest of the weights that wrote it, and only as far as the ids that it saw are
/// those of the context. The next token after a switch is therefore that of a session that ran the whole retained context under
/// the new weights.
#[derive(Debug)]
pub struct Session {
    backbone: Arc<Backbone>,
    base_digest: Arc<str>,
    active: Option<Active>,
    ids: Vec<u32>,
    caches: Caches,
    reached: usize,      // leading positions that were computed at least once, under whatever weights
    sampled_ahead: bool, // the id at `reached` was sampled here: to compute it first is decoding and no prefill
    usage: Usage,
}

/// The active state `z` of Eq. 6 where it is not empty.
#[derive(Debug)]
struct Active {
    alias: Capability,
    handle: AdapterHandle,
}

/// Why [`Session::generate`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was sampled.
    Stop,
    /// `max_new` tokens were sampled, or the context has no room for the next.
    Length,
    /// The caller asked for it.
    Interrupted,
}

/// What [`Session::generate`] sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The ids in order, a stop token included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

impl Session {
    pub(crate) fn new(backbone: Arc<Backbone>, base_digest: Arc<str>) -> Self {
        Self {
            backbone,
            base_digest,
            active: None,
            ids: Vec::new(),
            caches: Caches::default(),
            reached: 0,
            sampled_ahead: false,
            usage: Usage::default(),
        }
    }

    /// The alias of the active adapter, the `z` of Eq. 6.
    pub fn active(&self) -> Option<&Capability> {
        self.active.as_ref().map(|active| &active.alias)
    }

    /// The active weights as records name them: `base`, or the alias and the digest's first twelve digits, `alias@digest`.
    pub fn route(&self) -> String {
        match &self.active {
            None => "base".to_owned(),
            Some(Active { alias, handle }) => format!("{alias}@{:.12}", handle.digest()),
        }
    }

    /// Activates an adapter under an alias, or none. It is the only way in which the weights change; the context stays.
    ///
    /// # Panics
    /// If the handle is of an engine over another backbone.
    pub fn switch(&mut self, to: Option<(Capability, AdapterHandle)>) {
        if let Some((alias, handle)) = &to {
            assert_eq!(handle.base_digest(), &*self.base_digest, "the adapter {alias} is resident beside the session's backbone");
        }
        self.active = to.map(|(alias, handle)| Active { alias, handle });
        self.caches.drop_others(weights(self.active.as_ref(), &self.base_digest));
    }

    /// The retained context.
    pub fn context(&self) -> &[u32] {
        &self.ids
    }

    /// Replaces the retained context by what is left of it. What the weights have computed stays valid as far as both begin
    /// alike. Text that is new comes through [`Session::append`], so that [`Session::usage`] tells it from what is recomputed.
    pub fn set_context(&mut self, ids: Vec<u32>) {
        self.sampled_ahead &= common_prefix(&self.ids, &ids) > self.reached;
        self.reached = self.reached.min(ids.len());
        self.ids = ids;
    }

    /// Adds ids at the context's end.
    pub fn append(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
    }

    /// Token counts so far. The first computation of a sampled token is counted as sampled and not as prefilled.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Positions that were computed before and must be computed again, because the weights or the context before them changed.
    pub fn stale(&self) -> usize {
        let weights = weights(self.active.as_ref(), &self.base_digest);
        self.reached.saturating_sub(self.caches.reusable(weights, &self.ids))
    }

    /// Recomputes the stale positions now instead of at the next token, and waits until it is done: what a timeline counts as
    /// `rebuild`. A stale last position is left to the next token, which needs its logits.
    ///
    /// # Errors
    /// As [`Session::next_logits`], but an empty context is none.
    pub fn rebuild(&mut self) -> Result<()> {
        let weights = weights(self.active.as_ref(), &self.base_digest);
        let until = self.reached.min(self.ids.len().saturating_sub(1));
        if self.caches.reusable(weights, &self.ids[..until]) == until {
            return Ok(());
        }
        self.check_length()?;
        self.compute(until)?;
        self.backbone.device().sync().map_err(|e| Error::Other(format!("the device failed: {e}")))
    }

    /// The logits of the token after the context, computing what the active weights have not computed of it.
    ///
    /// # Shapes
    /// - output: `[vocab]`
    ///
    /// # Errors
    /// If the context is empty, is longer than the model's positions, or holds an id outside the vocabulary; if a logit is not
    /// finite: then the error names the first layer with such an output.
    pub fn next_logits(&mut self) -> Result<Vec<f32>> {
        if self.ids.is_empty() {
            return Err(Error::Other("the context is empty: a token needs at least one before it".to_owned()));
        }
        self.check_length()?;
        let last = self.compute(self.ids.len())?; // [1, hidden]
        let factors = self.active.as_ref().map(|active| active.handle.factors());
        let logits = to_vec(self.backbone.logits(last, factors));
        if logits.iter().all(|x| x.is_finite()) {
            return Ok(logits);
        }
        let place = first_not_finite(&self.backbone, factors, &self.ids);
        Err(weact_core::Error::NonFinite { what: "logits", place, dtype: self.backbone.dtype().name().to_owned() }.into())
    }

    /// Samples the next token and appends it.
    ///
    /// # Errors
    /// As [`Session::next_logits`] and [`Choose::next`]; the context is then unchanged.
    pub fn sample(&mut self, sampler: &mut dyn Choose) -> Result<u32> {
        let logits = self.next_logits()?;
        let id = sampler.next(&logits)?;
        self.ids.push(id);
        self.sampled_ahead = true;
        self.usage.sampled += 1;
        Ok(id)
    }

    /// Samples up to `max_new` tokens, each of which is appended and given to `on_token`. Ends after a token of `stop`, where
    /// the context is full, or before the next token where `interrupt` is true.
    ///
    /// # Errors
    /// As [`Session::sample`]; tokens sampled before stay in the context.
    pub fn generate(
        &mut self,
        sampler: &mut dyn Choose,
        max_new: usize,
        stop: &BTreeSet<u32>,
        interrupt: &dyn Fn() -> bool,
        on_token: &mut dyn FnMut(u32),
    ) -> Result<Generated> {
        let mut ids = Vec::new();
        let ended = |ids, finish| Ok(Generated { ids, finish });
        while ids.len() < max_new && (ids.is_empty() || self.ids.len() <= self.backbone.config.max_positions) {
            if interrupt() {
                return ended(ids, Finish::Interrupted);
            }
            let id = self.sample(sampler)?;
            ids.push(id);
            on_token(id);
            if stop.contains(&id) {
                return ended(ids, Finish::Stop);
            }
        }
        ended(ids, Finish::Length)
    }

    fn check_length(&self) -> Result<()> {
        let (n, max) = (self.ids.len(), self.backbone.config.max_positions);
        if n <= max {
            return Ok(());
        }
        Err(Error::Other(format!("the context has {n} tokens but the model {max} positions: retain less of the history")))
    }

    /// Computes the positions before `until` that the active weights' cache lacks, the last of them in any case.
    ///
    /// # Shapes
    /// - output: final hidden state of the last, `[1, hidden]`
    fn compute(&mut self, until: usize) -> Result<Tensor<2>> {
        let weights = weights(self.active.as_ref(), &self.base_digest);
        let factors = self.active.as_ref().map(|active| active.handle.factors());
        let ids = &self.ids[..until];
        let valid = self.caches.reusable(weights, ids);
        let from = valid.min(until - 1);

        let cached = self.caches.cut_to(weights, from, &self.backbone.config);
        let mut last = None;
        let outcome = prefill(&self.backbone, factors, ids, &mut cached.cache, &mut |hidden| last = Some(hidden));
        cached.ids.extend_from_slice(&ids[from..cached.cache.len()]);
        outcome?;

        let decoded = usize::from(self.sampled_ahead && until > self.reached);
        self.sampled_ahead &= decoded == 0;
        self.usage.prefilled += until - from - decoded;
        self.usage.recomputed += self.reached.min(until).saturating_sub(valid);
        self.reached = self.reached.max(until);
        let last = last.expect("at least one position was computed"); // [n, hidden]
        let n = last.dims()[0];
        Ok(last.narrow(0, n - 1, 1))
    }
}

/// The caches of a session, each reached only through the digest of the weights that wrote it. At most one is kept today.
#[derive(Debug, Default)]
struct Caches {
    kept: Option<Cached>,
}

/// Invariant: `cache` holds one position for each of `ids`, computed under `weights`.
#[derive(Debug)]
struct Cached {
    weights: String,
    ids: Vec<u32>,
    cache: KvCache,
}

impl Caches {
    /// How many first positions of `ids` stand in the cache that `weights` wrote.
    fn reusable(&self, weights: &str, ids: &[u32]) -> usize {
        self.kept.as_ref().filter(|c| c.weights == weights).map_or(0, |c| common_prefix(&c.ids, ids))
    }

    /// The cache that `weights` wrote, or a new one, cut to its first `len` positions.
    fn cut_to(&mut self, weights: &str, len: usize, config: &Config) -> &mut Cached {
        self.drop_others(weights);
        let cached = self.kept.get_or_insert_with(|| Cached {
            weights: weights.to_owned(),
            ids: Vec::new(),
            cache: KvCache::new(config, CHUNK),
        });
        cached.ids.truncate(len);
        cached.cache.truncate(len);
        cached
    }

    /// Keeps only the cache that `weights` wrote.
    fn drop_others(&mut self, weights: &str) {
        self.kept.take_if(|c| c.weights != weights);
    }
}

/// Digest of the active weights: the adapter's, or the backbone's where none is active.
fn weights<'a>(active: Option<&'a Active>, base_digest: &'a str) -> &'a str {
    active.map_or(base_digest, |active| active.handle.digest())
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

/// Computes the positions of `ids` that `cache` lacks, chunk by chunk, and hands out each chunk's final hidden states
/// `[n, hidden]`.
fn prefill(
    backbone: &Backbone,
    factors: Option<&FactorMap>,
    ids: &[u32],
    cache: &mut KvCache,
    on_chunk: &mut dyn FnMut(Tensor<2>),
) -> Result<()> {
    for chunk in ids[cache.len()..].chunks(CHUNK) {
        on_chunk(backbone.hidden(&backbone.tokens(&[chunk])?, factors, Some(cache)));
    }
    Ok(())
}

/// The first place whose output is not finite, as an error names it. The models that end after the first blocks are searched by
/// bisection: what is not finite stays so in the residual stream.
fn first_not_finite(backbone: &Backbone, factors: Option<&FactorMap>, ids: &[u32]) -> String {
    let finite_after = |n_blocks: usize| {
        let blocks = backbone.blocks[..n_blocks].to_vec();
        let beginning = Backbone { blocks, norm: backbone.norm.ones_like(), ..backbone.clone() };
        let mut finite = true;
        let mut cache = KvCache::new(&beginning.config, CHUNK);
        prefill(&beginning, factors, ids, &mut cache, &mut |hidden| finite &= to_vec(hidden).iter().all(|x| x.is_finite()))
            .expect("the same ids ran before");
        finite
    };
    let depths: Vec<usize> = (0..=backbone.blocks.len()).collect();
    match depths.partition_point(|n_blocks| finite_after(*n_blocks)) {
        0 => ", embedding".to_owned(),
        n if n == depths.len() => ", output head".to_owned(),
        n_blocks => format!(", layer {}", n_blocks - 1),
    }
}

fn to_vec(tensor: Tensor<2>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().try_to_vec::<f32>().expect("cast to f32")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{cell::Cell, path::Path};

    use burn::tensor::Device;
    use weact_core::{
        Adapter,
        io::{
            checkpoint::{self, Checkpoint},
            peft,
        },
        model::Parameter,
    };

    use super::*;
    use crate::{
        engine::Engine,
        sampler::{Sampler, Sampling},
    };

    /// An engine over a tiny checkpoint, and its adapter.
    pub(crate) fn golden(case: &str) -> (Engine, Adapter) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weact-core/tests/golden").join(case);
        let checkpoint = Checkpoint::open(&dir, false).expect("a whole checkpoint");
        let backbone = checkpoint.load(&Device::flex(), DType::F32).expect("loadable");
        let adapter = peft::read(&dir.join("adapter")).expect("an adapter");
        (Engine::new(Arc::new(backbone), checkpoint.digest()), adapter)
    }

    /// An adapter of the same shape with other weights.
    pub(crate) fn perturbed(adapter: &Adapter) -> Adapter {
        let mut plain = adapter.plain().clone();
        for factors in plain.values_mut() {
            factors.b.iter_mut().enumerate().for_each(|(i, b)| *b = 0.05 * (i as f32).sin() - *b);
        }
        Adapter::new(adapter.config().clone(), plain).expect("the same shapes")
    }

    fn history(len: usize, seed: usize) -> Vec<u32> {
        (0..len).map(|i| (3 + (i * i * 7 + i * 31 + seed * 13) % 190) as u32).collect()
    }

    fn named(alias: &str, handle: &AdapterHandle) -> Option<(Capability, AdapterHandle)> {
        Some((alias.parse().expect("legal"), handle.clone()))
    }

    fn greedy() -> Sampler {
        Sampler::new(Sampling::default()).expect("legal settings")
    }

    /// Logits without session, cache or chunks.
    fn cold(engine: &Engine, handle: Option<&AdapterHandle>, ids: &[u32]) -> Vec<f32> {
        let (backbone, factors) = (engine.backbone(), handle.map(AdapterHandle::factors));
        let hidden = backbone.hidden(&backbone.tokens(&[ids]).expect("legal ids"), factors, None);
        to_vec(backbone.logits(hidden.narrow(0, ids.len() - 1, 1), factors))
    }

    fn difference(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
    }

    /// Steps of greedy decoding: the logits before each token.
    fn steps(session: &mut Session, n: usize) -> Vec<Vec<f32>> {
        let mut sampler = greedy();
        let step = |_| {
            let logits = session.next_logits().expect("finite");
            session.append(&[sampler.next(&logits).expect("finite")]);
            logits
        };
        (0..n).map(step).collect()
    }

    #[test]
    fn after_a_switch_logits_equal_a_fresh_session() {
        for case in ["qwen3-tied", "llama"] {
            let (engine, adapter) = golden(case);
            let a = engine.make_resident(&adapter).expect("fits");
            let b = engine.make_resident(&perturbed(&adapter)).expect("fits");
            let mut session = engine.session();
            session.append(&history(60, 0));
            let stages = [None, Some(("plan", &a)), None, Some(("search", &b)), None, Some(("plan", &a))];
            for (stage, z) in stages.into_iter().enumerate() {
                session.switch(z.and_then(|(alias, handle)| named(alias, handle)));
                let handle = z.map(|(_, handle)| handle);
                let n_before = session.context().len();
                for (step, logits) in steps(&mut session, 20).iter().enumerate() {
                    let ids = &session.context()[..n_before + step];
                    let mut fresh = engine.session();
                    fresh.switch(z.and_then(|(alias, handle)| named(alias, handle)));
                    fresh.append(ids);
                    let rebuilt = fresh.next_logits().expect("finite");
                    for expected in [&rebuilt, &cold(&engine, handle, ids)] {
                        let off = difference(logits, expected);
                        assert!(off <= 1e-4, "{case}, stage {stage}, step {step}: off by {off}");
                        let greedy_id = greedy().next(expected).expect("finite");
                        assert_eq!(session.context()[ids.len()], greedy_id, "{case}, stage {stage}, step {step}");
                    }
                }
            }
            // The test sees a cache read under other weights only if these weights differ.
            let ids = history(60, 0);
            let base = cold(&engine, None, &ids);
            for handle in [&a, &b] {
                assert!(difference(&cold(&engine, Some(handle), &ids), &base) > 1e-2, "{case}: the adapter changes nothing");
            }
            assert!(difference(&cold(&engine, Some(&a), &ids), &cold(&engine, Some(&b), &ids)) > 1e-2);
        }
    }

    #[test]
    fn two_interleaved_sessions_equal_their_solo_runs_bit_for_bit() {
        let (engine, adapter) = golden("qwen3-tied");
        let a = engine.make_resident(&adapter).expect("fits");
        let b = engine.make_resident(&perturbed(&adapter)).expect("fits");
        let open = |alias: &str, handle, seed| {
            let mut session = engine.session();
            session.append(&history(40, seed));
            session.switch(named(alias, handle));
            session
        };
        let solo = [steps(&mut open("plan", &a, 1), 30), steps(&mut open("search", &b, 2), 30)];
        let mut both = [open("plan", &a, 1), open("search", &b, 2)];
        for step in 0..30 {
            for (session, solo) in both.iter_mut().zip(&solo) {
                assert_eq!(steps(session, 1)[0], solo[step], "step {step}");
            }
        }
    }

    #[test]
    fn cached_and_uncached_decoding_agree() {
        for case in ["qwen3-tied", "llama"] {
            let (engine, adapter) = golden(case);
            let a = engine.make_resident(&adapter).expect("fits");
            let mut session = engine.session();
            session.switch(named("plan", &a));
            session.append(&history(30, 3));
            let no_stop = BTreeSet::new();
            let made = session.generate(&mut greedy(), 40, &no_stop, &|| false, &mut |_| {}).expect("finite");
            let mut ids = history(30, 3);
            for id in &made.ids {
                let uncached = greedy().next(&cold(&engine, Some(&a), &ids)).expect("finite");
                assert_eq!(uncached, *id, "{case}, after {} ids", ids.len());
                ids.push(*id);
            }
            assert_eq!((ids.len(), made.finish), (70, Finish::Length));
        }
    }

    #[test]
    fn a_second_request_is_independent_of_the_first() {
        let (engine, adapter) = golden("llama");
        let a = engine.make_resident(&adapter).expect("fits");
        let request = |session: &mut Session| {
            session.set_context(history(25, 4));
            steps(session, 10)
        };
        let mut first = engine.session();
        first.switch(named("plan", &a));
        let expected = request(&mut first);
        let mut second = engine.session();
        second.switch(named("plan", &a));
        assert_eq!(request(&mut second), expected, "another session");
        let tokens = first.context().to_vec();
        // On the same session the prompt's last position is computed alone, which rounds otherwise.
        for (step, (again, expected)) in request(&mut first).iter().zip(&expected).enumerate() {
            assert!(difference(again, expected) <= 1e-4, "the same session, step {step}");
        }
        assert_eq!(first.context(), tokens);
    }

    #[test]
    fn switching_to_the_same_alias_with_new_weights_never_reads_the_old_cache() {
        let (engine, adapter) = golden("qwen3-tied");
        let (old, new) = (engine.make_resident(&adapter), engine.make_resident(&perturbed(&adapter)));
        let (old, new) = (old.expect("fits"), new.expect("fits"));
        let ids = history(60, 6);
        let mut session = engine.session();
        session.append(&ids);
        session.switch(named("search", &old));
        session.next_logits().expect("finite");
        let route = session.route();
        session.switch(named("search", &new));
        assert_eq!(session.active().map(Capability::as_str), Some("search"));
        assert_ne!(session.route(), route);
        assert_eq!(session.route(), format!("search@{}", &new.digest()[..12]));
        assert_eq!(session.stale(), 60);
        let logits = session.next_logits().expect("finite");
        assert!(difference(&logits, &cold(&engine, Some(&new), &ids)) <= 1e-4);
        assert!(difference(&logits, &cold(&engine, Some(&old), &ids)) > 1e-2);

        session.switch(named("plan", &new)); // another alias, the same weights: the cache is theirs
        assert_eq!(session.stale(), 0);
        assert!(difference(&session.next_logits().expect("finite"), &logits) <= 1e-4);
    }

    #[test]
    fn usage_tells_new_positions_from_recomputed_and_sampled_ones() {
        let (engine, adapter) = golden("qwen3-tied");
        let a = engine.make_resident(&adapter).expect("fits");
        let mut session = engine.session();
        let mut sampler = greedy();
        let mut check = |session: &mut Session, n: usize, stale: usize, (prefilled, recomputed, sampled)| {
            assert_eq!(session.stale(), stale);
            session.rebuild().expect("finite");
            for _ in 0..n {
                session.sample(&mut sampler).expect("finite");
            }
            assert_eq!(session.usage(), Usage { prefilled, recomputed, sampled });
        };
        session.append(&history(60, 7));
        check(&mut session, 3, 0, (60, 0, 3)); // 63 ids, the last not computed
        session.append(&history(10, 8));
        check(&mut session, 1, 0, (70, 0, 4)); // 74 ids
        session.switch(named("plan", &a));
        check(&mut session, 2, 73, (143, 73, 6)); // 76 ids
        let mut rewritten = session.context().to_vec();
        rewritten.splice(20..40, [5]); // as an omitted tool result: 57 ids, the first 20 as before
        session.set_context(rewritten);
        check(&mut session, 1, 37, (180, 110, 7));
        session.set_context(history(60, 7)[..10].to_vec()); // back to an earlier point, of which all is known
        check(&mut session, 0, 0, (180, 110, 7));
    }

    #[test]
    fn a_rewritten_context_is_recomputed_from_its_first_difference() {
        let (engine, _) = golden("llama");
        let mut session = engine.session();
        let ids = history(60, 12);
        session.append(&ids);
        session.next_logits().expect("finite");
        let shorter = [&ids[..20], &[5], &ids[40..]].concat();
        let swapped = [&ids[..50], &[ids[50] ^ 1], &ids[51..]].concat();
        for rewritten in [shorter, swapped, ids[..30].to_vec(), ids] {
            session.set_context(rewritten.clone());
            let off = difference(&session.next_logits().expect("finite"), &cold(&engine, None, &rewritten));
            assert!(off <= 1e-4, "{} ids: off by {off}", rewritten.len());
        }
    }

    #[test]
    fn chunked_prefill_equals_whole_prefill() {
        let (engine, adapter) = golden("llama");
        let mut backbone = Backbone::clone(engine.backbone());
        backbone.config.max_positions = 2048;
        let engine = Engine::new(Arc::new(backbone), "longer".to_owned());
        let a = engine.make_resident(&adapter).expect("fits");
        for len in [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 100] {
            let ids = history(len, 9);
            let mut session = engine.session();
            session.switch(named("plan", &a));
            session.append(&ids);
            let off = difference(&session.next_logits().expect("finite"), &cold(&engine, Some(&a), &ids));
            assert!(off <= 1e-4, "{len} ids: off by {off}");
        }
    }

    #[test]
    fn generation_ends_at_a_stop_token_at_the_length_or_when_interrupted() {
        let (engine, _) = golden("qwen3-tied"); // 256 positions
        let run = |n_ids: usize, max_new: usize, stop: &[u32], interrupt_after: usize| {
            let mut session = engine.session();
            session.append(&history(n_ids, 10));
            let seen = Cell::new(0);
            let stop = stop.iter().copied().collect();
            let interrupt = || seen.get() >= interrupt_after;
            let made =
                session.generate(&mut greedy(), max_new, &stop, &interrupt, &mut |_| seen.set(seen.get() + 1)).expect("finite");
            assert_eq!(seen.get(), made.ids.len());
            assert_eq!(session.context()[n_ids..], made.ids, "the context holds what was sampled");
            made
        };
        let free = run(20, 8, &[], 99);
        assert_eq!((free.ids.len(), free.finish), (8, Finish::Length));
        let stop = free.ids[5];
        let until = free.ids.iter().position(|id| *id == stop).expect("it is there") + 1;
        assert_eq!(run(20, 8, &[stop], 99), Generated { ids: free.ids[..until].to_vec(), finish: Finish::Stop });
        assert_eq!(run(20, 8, &[], 3), Generated { ids: free.ids[..3].to_vec(), finish: Finish::Interrupted });
        assert_eq!(run(20, 0, &[], 99), Generated { ids: Vec::new(), finish: Finish::Length });
        let full = run(254, 8, &[], 99); // the 256th position still has a token after it
        assert_eq!((full.ids.len(), full.finish), (3, Finish::Length));
    }

    #[test]
    fn a_context_that_cannot_be_run_is_an_error_that_says_why() {
        let (engine, _) = golden("qwen3-tied");
        let table = [
            (vec![], "the context is empty"),
            (history(257, 0), "257 tokens but the model 256 positions"),
            (vec![1, 199], "token id 199 is outside"),
        ];
        for (ids, expected) in table {
            let mut session = engine.session();
            session.append(&ids);
            let error = session.next_logits().expect_err("not runnable").to_string();
            assert!(error.contains(expected), "{error}");
            session.set_context(vec![1, 2, 3]);
            session.next_logits().expect("a good context runs afterwards");
        }
    }

    #[test]
    fn an_overflow_in_f16_names_layer_and_dtype_and_gives_no_token() {
        let (engine, _) = golden("qwen3-tied");
        let scaled = engine.backbone().map(&mut |name, parameter| match parameter {
            // The weights stay below f16's 65,504, the activations do not.
            Parameter::Matrix(w) if name == "model.layers.1.mlp.up_proj.weight" => {
                let largest = w.clone().abs().max().into_scalar::<f32>();
                Parameter::Matrix(w * (30_000.0 / largest))
            }
            other => other,
        });
        let dir = tempfile::tempdir().expect("a temporary folder");
        checkpoint::write(dir.path(), &scaled).expect("writable");
        let checkpoint = Checkpoint::open(dir.path(), false).expect("a whole checkpoint");
        for (dtype, expected) in [(DType::F32, None), (DType::F16, Some("non-finite logits, layer 1, dtype f16"))] {
            let backbone = checkpoint.load(&Device::flex(), dtype).expect("loadable");
            let mut session = Engine::new(Arc::new(backbone), checkpoint.digest()).session();
            session.append(&history(20, 11));
            let mut n_tokens = 0;
            let made = session.generate(&mut greedy(), 5, &BTreeSet::new(), &|| false, &mut |_| n_tokens += 1);
            match expected {
                None => assert_eq!(made.expect("finite in f32").ids.len(), 5),
                Some(expected) => {
                    let error = made.expect_err("overflows").to_string();
                    assert!(error.contains(expected), "{error}");
                    assert_eq!((n_tokens, session.context().len(), session.usage().sampled), (0, 20, 0));
                }
            }
        }
    }
}
