//! The CPU's fused operators: their values and gradients are those of the composed bodies and of finite differences, and depend
//! on nothing but their inputs: not on threads, nor on what is computed beside them, nor on what memory held before.

use std::{fmt, sync::Arc};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use half::bf16;
use proptest::{collection::vec, prelude::*};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weact_core::{
    lora::Factors,
    ops::{self, Heads, Operators, Sequence},
};

/// Fails unless `got` is `expected` up to `tolerance` times its largest number, or times 0.1 where all are smaller: then they are
/// what is left of numbers of the inputs' size. Of tolerance 0 the bits are the same. NaNs are in the same places.
fn check(what: &str, got: &[f32], expected: &[f32], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: how many numbers");
    let largest = expected.iter().fold(0.1, |largest: f64, x| largest.max(f64::from(x.abs())));
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let agrees = match tolerance {
            0.0 => g.to_bits() == e.to_bits(),
            _ if e.is_nan() => g.is_nan(),
            _ => f64::from((g - e).abs()) <= tolerance * largest,
        };
        assert!(agrees, "{what}: number {i} is {g:e}, expected {e:e} ({largest:e} is the largest)");
    }
}

/// Sums of f32 in another order: of 15 000 random calls the worst are off by a third of this, values and gradients.
const VALUES: f64 = 5e-6;
const GRADIENTS: f64 = 3e-5;

// Calls of operators.

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug)]
enum Laid {
    Plain,
    /// After another row.
    Behind,
    /// Beside another column.
    Between,
    /// The transpose of what lies there.
    Turned,
}

#[derive(Clone, Debug)]
struct Input {
    name: &'static str,
    values: Vec<f32>,
    shape: [usize; 2],
    trained: bool,
    laid: Laid,
    /// The fused body takes it in bf16; the composed one gets the same numbers in f32.
    is_bf16: bool,
    /// Its row `i` is of the output's row `i`.
    by_row: bool,
}

impl Input {
    fn frozen(self) -> Self {
        Self { trained: false, ..self }
    }

    fn by_row(self) -> Self {
        Self { by_row: true, ..self }
    }

    fn plain(self) -> Self {
        Self { laid: Laid::Plain, ..self }
    }

    fn can_be_trained(&self) -> bool {
        !["upstream", "cos", "sin", "targets"].contains(&self.name)
    }

    fn rows(&self, rows: impl IntoIterator<Item = usize>) -> Self {
        let [_, d] = self.shape;
        let values: Vec<f32> = rows.into_iter().flat_map(|i| self.values[i * d..][..d].to_vec()).collect();
        Self { shape: [values.len() / d, d], values, ..self.clone() }
    }

    fn tensor(&self, operators: Operators, device: &Device) -> Tensor<2> {
        let [n, d] = self.shape;
        let at = |i: usize, j: usize| self.values[i * d + j];
        let rows = |n: usize, d: usize, at: &dyn Fn(usize, usize) -> f32| {
            let values: Vec<f32> = (0..n * d).map(|i| at(i / d, i % d)).collect();
            match self.is_bf16 && operators == Operators::Fused {
                true => {
                    let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                    Tensor::<2>::from_data(TensorData::new(values, [n, d]), (device, DType::BF16))
                }
                false => Tensor::<2>::from_data(TensorData::new(values, [n, d]), (device, DType::F32)),
            }
        };
        let x = match self.laid {
            Laid::Plain => rows(n, d, &at),
            Laid::Behind => rows(n + 1, d, &|i, j| if i == 0 { 9.0 } else { at(i - 1, j) }).narrow(0, 1, n),
            Laid::Between => rows(n, d + 1, &|i, j| if j == 0 { 9.0 } else { at(i, j - 1) }).narrow(1, 1, d),
            Laid::Turned => rows(d, n, &|i, j| at(j, i)).transpose(),
        };
        if self.trained { x.require_grad() } else { x }
    }
}

type Body = dyn Fn(Operators, &[Tensor<2>]) -> Tensor<2> + Send + Sync;

/// An operator with its inputs; the last of them is the gradient that comes from above.
#[derive(Clone)]
struct Call {
    operator: &'static str,
    inputs: Vec<Input>,
    body: Arc<Body>,
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operator)?;
        for Input { name, shape, trained, laid, is_bf16, .. } in &self.inputs {
            write!(f, "\n  {name} {shape:?} {laid:?}, trained {trained}, bf16 {is_bf16}")?;
        }
        Ok(())
    }
}

/// The output of a call, and the gradient of each trained input by name.
type Computed = Vec<(&'static str, Vec<f32>)>;

impl Call {
    fn new(
        operator: &'static str,
        inputs: Vec<Input>,
        body: impl Fn(Operators, &[Tensor<2>]) -> Tensor<2> + Send + Sync + 'static,
    ) -> Self {
        Self { operator, inputs, body: Arc::new(body) }
    }

    fn with(&self, inputs: Vec<Input>) -> Self {
        Self { inputs, ..self.clone() }
    }

    /// The same of some rows.
    fn of_rows(&self, rows: &[usize]) -> Self {
        let some = |x: &Input| if x.by_row { x.rows(rows.iter().copied()) } else { x.clone() };
        self.with(self.inputs.iter().map(some).collect())
    }

    /// # Panics
    /// If a frozen input has a gradient, a trained one has none, or there is a graph where all are frozen.
    fn compute(&self, operators: Operators) -> Computed {
        let device = Device::flex().autodiff();
        let inputs: Vec<Tensor<2>> = self.inputs.iter().map(|x| x.tensor(operators, &device)).collect();
        let (upstream, inputs) = inputs.split_last().expect("an upstream gradient");
        let out = (self.body)(operators, inputs);
        let is_trained = self.inputs.iter().any(|x| x.trained);
        assert_eq!(out.is_tracked(), is_trained, "{self:?}: has a graph");
        let mut computed = vec![("output", read(&out))];
        if !is_trained {
            return computed;
        }
        let gradients = (out * upstream.clone()).sum().backward();
        for (tensor, Input { name, trained, shape, .. }) in inputs.iter().zip(&self.inputs) {
            let gradient = tensor.grad(&gradients);
            assert_eq!(gradient.is_some(), *trained, "{self:?}: {name} has a gradient");
            if let Some(gradient) = gradient {
                assert_eq!(gradient.dims(), *shape, "{self:?}: shape of the gradient of {name}");
                computed.push((name, read(&gradient)));
            }
        }
        computed
    }

    /// `sum(upstream * output)`, summed in f64.
    fn loss(&self) -> f64 {
        let upstream = self.inputs.last().expect("an upstream gradient");
        let out = &self.compute(Operators::Fused)[0].1;
        out.iter().zip(&upstream.values).map(|(x, g)| f64::from(*x) * f64::from(*g)).sum()
    }

    /// Checks everything computed.
    fn check(&self, got: &Computed, expected: &Computed, [of_values, of_gradients]: [f64; 2]) {
        for (i, ((name, got), (_, expected))) in got.iter().zip(expected).enumerate() {
            check(&format!("{self:?}\n{name}"), got, expected, if i == 0 { of_values } else { of_gradients });
        }
    }
}

fn read(x: &Tensor<2>) -> Vec<f32> {
    x.clone().into_data().try_to_vec().expect("f32")
}

/// Draws inputs: most of them trained, lying in any way.
struct Random(ChaCha8Rng);

impl Random {
    fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn input(&mut self, name: &'static str, shape: [usize; 2]) -> Input {
        let values = (0..shape[0] * shape[1]).map(|_| self.0.random_range(-1.0..1.0)).collect();
        let laid = [Laid::Plain, Laid::Behind, Laid::Between, Laid::Turned][self.0.random_range(0..4)];
        Input { name, values, shape, trained: self.0.random_bool(0.7), laid, is_bf16: false, by_row: false }
    }

    fn upstream(&mut self, shape: [usize; 2]) -> Input {
        self.input("upstream", shape).frozen().by_row()
    }

    /// A third is trained, a third frozen, a third frozen in bf16.
    fn weight(&mut self, shape: [usize; 2]) -> Input {
        let mut weight = self.input("weight", shape);
        let kind = self.0.random_range(0..3);
        (weight.trained, weight.is_bf16) = (kind == 0, kind == 1);
        if weight.is_bf16 {
            weight.values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        weight
    }
}

fn rms_norm([n, groups, d]: [usize; 3], seed: u64) -> Call {
    let mut random = Random::new(seed);
    let shape = [n, groups * d];
    let inputs = vec![random.input("x", shape).by_row(), random.input("weight", [1, d]), random.upstream(shape)];
    Call::new("rms_norm", inputs, move |operators, x| ops::rms_norm(operators, x[0].clone(), &x[1].clone().reshape([d]), 1e-6))
}

fn rope([n, heads, half]: [usize; 3], seed: u64) -> Call {
    let mut random = Random::new(seed);
    let shape = [n, heads * 2 * half];
    let mut cos = random.input("cos", [n, half]).frozen().by_row().plain();
    let mut sin = Input { name: "sin", ..cos.clone() };
    cos.values.iter_mut().for_each(|x| *x = (*x * 50.0).cos());
    sin.values.iter_mut().for_each(|x| *x = (*x * 50.0).sin());
    let inputs = vec![random.input("x", shape).by_row(), cos, sin, random.upstream(shape)];
    Call::new("rope", inputs, |operators, x| ops::rope(operators, x[0].clone(), &x[1], &x[2]))
}

fn swiglu(shape: [usize; 2], seed: u64) -> Call {
    let mut random = Random::new(seed);
    let inputs = vec![random.input("gate", shape).by_row(), random.input("up", shape).by_row(), random.upstream(shape)];
    Call::new("swiglu", inputs, |operators, x| ops::swiglu(operators, x[0].clone() * 4.0, x[1].clone()))
}

/// Of rank 0 there is no update.
fn update(rank: usize, inputs: &[Tensor<2>]) -> Option<Factors> {
    (rank > 0).then(|| Factors { a: inputs[0].clone(), b: inputs[1].clone(), scale: 0.7 })
}

fn linear([n, d_in, d_out]: [usize; 3], rank: usize, has_residual: bool, seed: u64) -> Call {
    let mut random = Random::new(seed);
    let mut inputs = vec![random.input("x", [n, d_in]).by_row(), random.weight([d_in, d_out])];
    if rank > 0 {
        inputs.extend([random.input("a", [d_in, rank]), random.input("b", [rank, d_out])]);
    }
    if has_residual {
        inputs.push(random.input("residual", [n, d_out]).by_row());
    }
    inputs.push(random.upstream([n, d_out]));
    Call::new("linear", inputs, move |operators, x| {
        let residual = has_residual.then(|| x[x.len() - 1].clone());
        ops::linear(operators, x[0].clone(), &x[1], update(rank, &x[2..]).as_ref(), residual)
    })
}

/// `lengths` are each sequence's new positions and those before them.
fn attention([n_kv_heads, group, head_dim]: [usize; 3], lengths: &[(usize, usize)], seed: u64) -> Call {
    let mut random = Random::new(seed);
    let sequences = lengths.iter().map(|(n_new, past)| Sequence { n_new: *n_new, n_keys: n_new + past }).collect();
    let heads = Heads { n_heads: n_kv_heads * group, n_kv_heads, head_dim };
    let n_new: usize = lengths.iter().map(|(n_new, _)| n_new).sum();
    let n_keys: usize = lengths.iter().map(|(n_new, past)| n_new + past).sum();
    let [width, kv_width] = [heads.n_heads, n_kv_heads].map(|n| n * head_dim);
    let inputs = vec![
        random.input("q", [n_new, width]),
        random.input("k", [n_keys, kv_width]),
        random.input("v", [n_keys, kv_width]),
        random.upstream([n_new, width]),
    ];
    attention_of(inputs, heads, sequences)
}

fn attention_of(inputs: Vec<Input>, heads: Heads, sequences: Arc<[Sequence]>) -> Call {
    Call::new("attention", inputs, move |operators, x| {
        ops::attention(operators, [x[0].clone() * 4.0, x[1].clone(), x[2].clone()], heads, &sequences)
    })
}

fn ids(x: &Tensor<2>) -> Tensor<1, Int> {
    x.clone().reshape([x.dims()[0]]).int()
}

fn token_nll([n, d, vocab]: [usize; 3], rank: usize, seed: u64) -> Call {
    let mut random = Random::new(seed);
    let mut targets = random.input("targets", [n, 1]).frozen().by_row();
    targets.values.iter_mut().for_each(|x| *x = ((*x + 1.0) / 2.0 * vocab as f32).floor().min(vocab as f32 - 1.0));
    let mut inputs = vec![random.input("hidden", [n, d]).by_row(), targets, random.weight([d, vocab])];
    if rank > 0 {
        inputs.extend([random.input("a", [d, rank]), random.input("b", [rank, vocab])]);
    }
    inputs.push(random.upstream([n, 1]));
    Call::new("token_nll", inputs, move |operators, x| {
        let nll = ops::token_nll(operators, x[0].clone(), &x[2], update(rank, &x[3..]).as_ref(), ids(&x[1]));
        nll.unsqueeze_dim(1)
    })
}

// Any calls.

/// Calls whose output has a row for each row of an input.
fn any_call_by_rows() -> impl Strategy<Value = Call> {
    let seed = any::<u64>;
    prop_oneof![
        (1..300_usize, 1..4_usize, 4..80_usize, seed()).prop_map(|(n, groups, d, seed)| rms_norm([n, groups, d], seed)),
        (1..300_usize, 1..4_usize, 1..20_usize, seed()).prop_map(|(n, heads, half, seed)| rope([n, heads, half], seed)),
        (1..200_usize, 1..150_usize, seed()).prop_map(|(n, d, seed)| swiglu([n, d], seed)),
        (1..80_usize, 1..160_usize, 1..160_usize, 0..6_usize, any::<bool>(), seed())
            .prop_map(|(n, d_in, d_out, rank, residual, seed)| linear([n, d_in, d_out], rank, residual, seed)),
        (1..4_usize, 1..100_usize, 1..120_usize, 0..6_usize, any::<bool>(), seed())
            .prop_map(|(n, d_in, d_out, rank, residual, seed)| linear([n, d_in, d_out], rank, residual, seed)),
        (1..80_usize, 1..50_usize, prop_oneof![1..100_usize, 500..1100_usize], 0..6_usize, seed())
            .prop_map(|(n, d, vocab, rank, seed)| token_nll([n, d, vocab], rank, seed)),
    ]
}

type Lengths = Vec<(usize, usize)>;

/// Key heads, queries per key and numbers per head; new and earlier positions of sequences, some of them equal.
fn any_heads() -> impl Strategy<Value = ([usize; 3], Lengths)> {
    let lengths = vec((1..60_usize, prop_oneof![Just(0), 1..60_usize]), 1..4);
    let heads = (1..4_usize, 1..4_usize, 1..40_usize).prop_map(<[usize; 3]>::from);
    (heads, lengths, any::<bool>()).prop_map(|(heads, mut lengths, twice)| {
        if twice {
            lengths.push(lengths[lengths.len() - 1]);
        }
        (heads, lengths)
    })
}

fn any_call() -> impl Strategy<Value = Call> {
    let attentions = (any_heads(), any::<u64>()).prop_map(|((heads, lengths), seed)| attention(heads, &lengths, seed));
    prop_oneof![5 => any_call_by_rows(), 2 => attentions]
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn fused_equals_composed(call in any_call()) {
        call.check(&call.compute(Operators::Fused), &call.compute(Operators::Composed), [VALUES, GRADIENTS]);
    }

    /// The likelihood of frozen and trained heads goes different ways; all else is the same to the bit.
    #[test]
    fn what_is_trained_beside_it_does_not_change_a_gradient(call in any_call()) {
        let all = |x: &Input| Input { trained: x.can_be_trained() && !x.is_bf16, ..x.clone() };
        let of_all = call.with(call.inputs.iter().map(all).collect()).compute(Operators::Fused);
        let tolerance = if call.operator == "token_nll" { GRADIENTS } else { 0.0 };
        for (name, got) in call.compute(Operators::Fused) {
            let (_, expected) = of_all.iter().find(|(of, _)| *of == name).expect("all are trained");
            check(&format!("{call:?}\n{name}"), &got, expected, tolerance);
        }
    }

    /// Kernels write into memory that holds the numbers of earlier calls.
    #[test]
    fn what_memory_held_before_does_not_matter(call in any_call()) {
        let first = call.compute(Operators::Fused);
        let poisoned = |x: &Input| match x.name {
            "targets" => x.clone(),
            _ => Input { values: vec![f32::NAN; x.values.len()], ..x.clone() },
        };
        call.with(call.inputs.iter().map(poisoned).collect()).compute(Operators::Fused);
        call.check(&call.compute(Operators::Fused), &first, [0.0; 2]);
    }

    /// Packed rows don't see each other. One row alone takes another kernel, whose sums have another order.
    #[test]
    fn a_row_is_the_same_whatever_is_computed_beside_it(call in any_call_by_rows(), mask in vec(any::<bool>(), 300)) {
        let n = call.inputs[0].shape[0];
        let rows: Vec<usize> = (0..n).filter(|i| mask[*i]).collect();
        prop_assume!(!rows.is_empty());
        let all = call.compute(Operators::Fused);
        let is_by_row = |name: &str| name == "output" || call.inputs.iter().any(|x| x.name == name && x.by_row);
        let some = call.of_rows(&rows).compute(Operators::Fused);
        for ((name, some), (_, all)) in some.iter().zip(&all).filter(|((name, _), _)| is_by_row(name)) {
            let d = all.len() / n;
            let expected: Vec<f32> = rows.iter().flat_map(|i| all[i * d..][..d].to_vec()).collect();
            let one_row = rows.len() == 1 || n == 1;
            check(&format!("{call:?}\n{name}, rows {rows:?}"), some, &expected, if one_row { VALUES } else { 0.0 });
        }
    }

    /// A sequence alone, and its last positions after the others were stored.
    #[test]
    fn a_sequence_is_the_same_whatever_is_packed_beside_it((heads, lengths) in any_heads(), seed in any::<u64>()) {
        let [n_kv_heads, group, head_dim] = heads;
        let packed = attention(heads, &lengths, seed);
        let packed = packed.with(packed.inputs.iter().map(|x| Input { trained: x.can_be_trained(), ..x.clone() }).collect());
        let heads = Heads { n_heads: n_kv_heads * group, n_kv_heads, head_dim };
        let together = packed.compute(Operators::Fused);
        let (mut first_query, mut first_key) = (0, 0);
        for (n_new, past) in lengths {
            let n_keys = n_new + past;
            let (queries, keys) = (first_query..first_query + n_new, first_key..first_key + n_keys);
            for n_last in [n_new, n_new.div_ceil(2), 1] {
                let last = queries.end - n_last..queries.end;
                let rows = |x: &Input| x.rows(if ["k", "v"].contains(&x.name) { keys.clone() } else { last.clone() });
                let inputs = packed.inputs.iter().map(rows).collect();
                let alone = attention_of(inputs, heads, [Sequence { n_new: n_last, n_keys }].into()).compute(Operators::Fused);
                let sides = [("output", &last), ("q", &last), ("k", &keys), ("v", &keys)];
                let n_sides = if n_last == n_new { 4 } else { 2 }; // keys have gradients of the other positions too
                for (i, (name, rows)) in sides.into_iter().enumerate().take(n_sides) {
                    let d = if i < 2 { heads.n_heads * head_dim } else { n_kv_heads * head_dim };
                    let expected = &together[i].1[rows.start * d..rows.end * d];
                    check(&format!("{packed:?}\n{name}, rows {rows:?}"), &alone[i].1, expected, 0.0);
                }
            }
            (first_query, first_key) = (queries.end, keys.end);
        }
    }

    #[test]
    fn the_sum_of_squares_is_the_one_in_f64(n in 1..40_000_usize, seed in any::<u64>()) {
        let x = Random::new(seed).input("x", [n, 1]);
        let sum = ops::sum_of_squares(x.frozen().tensor(Operators::Fused, &Device::flex()).reshape([n]));
        let expected: f64 = Random::new(seed).input("x", [n, 1]).values.iter().map(|x| f64::from(*x).powi(2)).sum();
        check("sum of squares", &[sum as f32], &[expected as f32], 1e-6);
    }
}

// Fixed calls.

/// One or two of each operator, small, with every input trained.
fn small_calls() -> Vec<Call> {
    let calls = [
        rms_norm([3, 2, 5], 1),
        rope([3, 2, 2], 2),
        swiglu([3, 5], 3),
        linear([3, 5, 4], 2, true, 4),
        linear([1, 5, 4], 2, true, 5),
        attention([2, 2, 3], &[(3, 0), (2, 2)], 6),
        token_nll([3, 4, 7], 2, 7),
        token_nll([3, 4, 7], 0, 8),
    ];
    let trained = |x: &Input| Input { trained: x.can_be_trained(), is_bf16: false, ..x.clone() };
    let frozen_head = |x: &Input| Input { trained: x.name == "hidden", is_bf16: false, ..x.clone() };
    let mut calls: Vec<Call> = calls.iter().map(|call| call.with(call.inputs.iter().map(trained).collect())).collect();
    calls.push(calls[7].with(calls[7].inputs.iter().map(frozen_head).collect()));
    calls
}

/// Central differences with a step of 1e-2: rounding of the outputs leaves 1e-7 / 1e-2 of each, the third derivative 1e-4 / 6.
#[test]
fn gradients_are_those_of_finite_differences() {
    const STEP: f32 = 1e-2;
    for call in small_calls() {
        for (name, gradient) in call.compute(Operators::Fused).into_iter().skip(1) {
            let which = call.inputs.iter().position(|x| x.name == name).expect("an input of this name");
            let at = |i: usize, step: f32| {
                let mut inputs = call.inputs.clone();
                inputs[which].values[i] += step;
                (call.with(inputs.clone()).loss(), f64::from(inputs[which].values[i]))
            };
            let slope = |i: usize| {
                let ((above, x_above), (below, x_below)) = (at(i, STEP), at(i, -STEP));
                ((above - below) / (x_above - x_below)) as f32
            };
            let expected: Vec<f32> = (0..gradient.len()).map(slope).collect();
            check(&format!("{call:?}\n{name}"), &gradient, &expected, 2e-3);
        }
    }
}

#[test]
fn results_are_the_same_bits_on_any_number_of_threads() {
    let large_calls = [
        rms_norm([500, 2, 40], 1),
        rope([500, 3, 8], 2),
        swiglu([7, 5000], 3),
        linear([61, 130, 150], 3, true, 4),
        linear([200, 130, 20], 3, false, 5),
        linear([1, 400, 701], 3, true, 6),
        attention([2, 3, 16], &[(130, 0), (130, 0), (1, 70), (60, 9)], 7),
    ];
    // Heads that are trained and frozen, straight and turned, in f32 and bf16.
    let heads = (0..8).map(|seed| token_nll([70, 48, 1500], if seed < 4 { 0 } else { 3 }, seed));
    let numbers = Random::new(9).input("x", [50_000, 1]).plain().frozen();
    let squares = || ops::sum_of_squares(numbers.tensor(Operators::Fused, &Device::flex()).reshape([50_000]));
    let on = |threads: usize, call: &Call| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| (call.compute(Operators::Fused), squares()))
    };
    for call in large_calls.into_iter().chain(heads) {
        let (one, one_sum) = on(1, &call);
        for threads in [2, 3, 8] {
            let (several, several_sum) = on(threads, &call);
            call.check(&several, &one, [0.0; 2]);
            assert_eq!(several_sum.to_bits(), one_sum.to_bits());
        }
    }
}

/// Quiet, negative, and the one that CUDA devices make, whose low bits are set.
const NANS: [u32; 3] = [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff];

#[test]
fn a_nan_comes_out_where_the_composed_body_has_one() {
    for (call, bits) in small_calls().into_iter().flat_map(|call| NANS.map(|bits| (call.clone(), bits))) {
        for which in (0..call.inputs.len() - 1).filter(|i| call.inputs[*i].name != "targets") {
            let mut inputs = call.inputs.clone();
            inputs[which].values[0] = f32::from_bits(bits);
            let call = call.with(inputs);
            let what = format!("{call:?}\n{bits:x} in {}", call.inputs[which].name);
            let (fused, composed) = (call.compute(Operators::Fused), call.compute(Operators::Composed));
            check(&what, &fused[0].1, &composed[0].1, VALUES);
            let holds_nan = |x: &Computed| x.iter().map(|(_, values)| values.iter().any(|v| v.is_nan())).collect::<Vec<_>>();
            assert_eq!(holds_nan(&fused), holds_nan(&composed), "{what}");
        }
    }
}

/// Each of the call's input values replaced, in order and again from the start.
fn with_values(call: &Call, values: &[(&str, &[f32])]) -> Call {
    let replaced = |x: &Input| match values.iter().find(|(name, _)| *name == x.name) {
        Some((_, new)) => Input { values: new.iter().copied().cycle().take(x.values.len()).collect(), ..x.clone() },
        None => x.clone(),
    };
    call.with(call.inputs.iter().map(replaced).collect())
}

/// Gradients are further off than elsewhere: they use the logarithm of a sum, whose 24 bits leave an error of 4e-6 at 80 and more
/// beyond.
#[test]
fn extreme_numbers_are_as_in_the_composed_body() {
    let calls = small_calls();
    let [norm, swiglu, linear, row, attention, adapted, trained, frozen] = [0, 2, 3, 4, 5, 6, 7, 8].map(|i| &calls[i]);
    let large: &[f32] = &[1e4, -2e4, 3e3, 1.0, 0.0, -5e3, 7e3];
    let logits: &[f32] = &[80.0, -80.0, 79.0, 0.0, -3.0];
    for call in [
        with_values(norm, &[("x", large)]),
        with_values(norm, &[("x", &[0.0])]),
        with_values(norm, &[("x", &[1e-6, 2e-7, 0.0])]),
        with_values(swiglu, &[("gate", &[20.0, -20.0, 22.0, -22.0, 5.0])]), // times 4
        with_values(swiglu, &[("gate", large)]),
        with_values(linear, &[("x", large)]),
        with_values(row, &[("x", large)]),
        with_values(attention, &[("q", &[20.0, 0.0, 0.0]), ("k", &[1.0, 0.0, 0.0, -1.0, 0.0, 0.0])]),
        with_values(attention, &[("q", &[1e3, -1e3, 1e3]), ("k", &[1.0, 0.5, -1.0, 0.25])]),
        with_values(attention, &[("v", large)]),
        with_values(trained, &[("hidden", &[1.0, 0.0, 0.0, 0.0]), ("weight", logits)]),
        with_values(frozen, &[("hidden", &[1.0, 0.0, 0.0, 0.0]), ("weight", logits)]),
        with_values(adapted, &[("hidden", &[1.0, 0.0, 0.0, 0.0]), ("weight", &[0.0]), ("a", &[1.0, 0.0]), ("b", logits)]),
    ] {
        let (fused, composed) = (call.compute(Operators::Fused), call.compute(Operators::Composed));
        assert!(fused.iter().all(|(_, values)| values.iter().all(|x| x.is_finite())), "{call:?}: {fused:?}");
        call.check(&fused, &composed, [VALUES, 1e-4]);
    }
}

/// `log sum exp(z) - z_t` by hand: of logits 80 and -80 it is 0 and 160, and the gradient of both is 1 - 0.
#[test]
fn the_likelihood_of_logits_of_80_is_exact() {
    let device = Device::flex().autodiff();
    let matrix = |values: &[f32], shape: [usize; 2]| Tensor::<2>::from_data(TensorData::new(values.to_vec(), shape), &device);
    let hidden = matrix(&[1.0, 1.0, -1.0], [3, 1]).require_grad();
    let head = matrix(&[80.0, -80.0], [1, 2]).require_grad();
    let targets = Tensor::from_data(TensorData::new(vec![0, 1, 0], [3]), &device);
    let nll = ops::token_nll(Operators::Fused, hidden.clone(), &head, None, targets);
    check("nll", &read(&nll.clone().unsqueeze_dim(1)), &[0.0, 160.0, 160.0], 1e-7);
    let gradients = nll.sum().backward();
    check("hidden", &read(&hidden.grad(&gradients).expect("trained")), &[0.0, 160.0, -160.0], 1e-6);
    check("head", &read(&head.grad(&gradients).expect("trained")), &[2.0, -2.0], 1e-5);
}

/// Small whole numbers make equal logits, in one block of the vocabulary and across blocks; of eight of them, few.
#[test]
fn the_best_token_is_the_first_of_the_most_likely() {
    let device = Device::flex();
    for (seed, (n, d, vocab)) in [(70, 3, 1100), (70, 8, 1100), (33, 2, 513), (5, 4, 40), (1, 8, 700)].into_iter().enumerate() {
        let mut random = ChaCha8Rng::seed_from_u64(seed as u64);
        let mut whole = |n: usize| (0..n).map(|_| random.random_range(-2..=2) as f32).collect::<Vec<f32>>();
        let (hidden, head) = (whole(n * d), whole(d * vocab));
        let logit = |i: usize, v: usize| (0..d).map(|k| hidden[i * d + k] * head[k * vocab + v]).sum::<f32>();
        let first_best = |i: usize| {
            (0..vocab).rev().max_by(|a, b| logit(i, *a).partial_cmp(&logit(i, *b)).expect("numbers")).expect("tokens") as f32
        };
        let expected: Vec<f32> = (0..n).map(first_best).collect();
        let matrix = |values: &[f32], shape: [usize; 2]| Tensor::<2>::from_data(TensorData::new(values.to_vec(), shape), &device);
        let targets = || Tensor::from_data(TensorData::new((0..n as i64).collect(), [n]), &device);
        let (x, w) = (matrix(&hidden, [n, d]), matrix(&head, [d, vocab]));
        let (nll, best) = ops::token_scores(Operators::Fused, x.clone(), &w, None, targets());
        let best: Vec<f32> = best.into_data().iter::<f32>().collect();
        check("best", &best, &expected, 0.0);
        let alone = ops::token_nll(Operators::Fused, x, &w, None, targets());
        check("nll", &read(&nll.unsqueeze_dim(1)), &read(&alone.unsqueeze_dim(1)), 0.0);
    }
}
