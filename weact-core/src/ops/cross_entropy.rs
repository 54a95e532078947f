//! Negative log-likelihood of target tokens straight from hidden states and the output matrix:
//!
//! `nll_i = log sum_v exp(z_iv) - z_it`, `z = x W + low b`
//!
//! with `low b` the update of an adapted head. A tensor of all tokens x vocabulary never exists: logits live for a chunk of tokens,
//! in a buffer of fixed size. Backward: `dz_iv = g_i (softmax(z_i)_v - [v = t_i])`, `dx = dz W^T`, `dW = x^T dz`. Where the head is
//! frozen, `dx` for `g = 1` is computed while the chunk's logits are there (it is linear in `g_i`). Where it is trained, a single
//! chunk's logits stay in their buffer; those of several chunks are computed again.
//!
//! Tokens are the columns of all products (`z^T = W^T x^T`), so that the vocabulary's matrix, the largest of a model, is read in
//! the order in which it lies and never packed.

use std::sync::Arc;

use burn::{
    backend::{
        Autodiff, AutodiffBackend, Backend, Dispatch, Flex,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Tensor, activation::log_softmax},
};
use burn_flex::FlexTensor;
use pulp::Simd;
use rayon::prelude::*;

use super::{
    Operators,
    buffer::Buffer,
    flex::{contiguous, dims, indices, values},
    linear::linear,
    matrix::{Element as _, Matrix, PANEL, PanelView, Panels, Strips, Weight, weight_of},
    product::{Onto, Term, multiply_here},
    simd::exp,
};
use crate::lora::Factors;

/// Logits held at a time: 64 MiB.
const CHUNK_LOGITS: usize = 1 << 24;

/// Rows of the vocabulary's matrix that one thread takes at a time: they stay in its cache.
const VOCABULARY: usize = 512;

/// Negative log-likelihood of `targets`, in nats.
///
/// # Shapes
/// - `hidden`: `[n, d]`, `head`: `[d, vocab]`, `targets` and output: `[n]`
pub fn token_nll(
    operators: Operators,
    hidden: Tensor<2>,
    head: &Tensor<2>,
    factors: Option<&Factors>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    match operators {
        Operators::Composed => nll_of(composed_logits(hidden, head, factors), targets),
        Operators::Fused => {
            let [x, w, low, b] = inputs(hidden, head, factors);
            let nll = <Dispatch as CrossEntropy>::fused_token_nll(
                x.into_dispatch(),
                w.into_dispatch(),
                low.into_dispatch(),
                b.into_dispatch(),
                targets.into_dispatch(),
            );
            Tensor::from_dispatch(nll)
        }
    }
}

/// The same, and the most likely token of each place; without gradients.
///
/// # Shapes
/// - output: `[n]` each
pub fn token_scores(
    operators: Operators,
    hidden: Tensor<2>,
    head: &Tensor<2>,
    factors: Option<&Factors>,
    targets: Tensor<1, Int>,
) -> (Tensor<1>, Tensor<1, Int>) {
    match operators {
        Operators::Composed => {
            let logits = composed_logits(hidden, head, factors);
            let best = logits.clone().argmax(1).squeeze_dim::<1>(1);
            (nll_of(logits, targets), best)
        }
        Operators::Fused => {
            let n = targets.dims()[0];
            let [x, w, low, b] = inputs(hidden, head, factors);
            let both = <Dispatch as CrossEntropy>::fused_token_scores(
                x.into_dispatch(),
                w.into_dispatch(),
                low.into_dispatch(),
                b.into_dispatch(),
                targets.into_dispatch(),
            );
            let both = Tensor::<1>::from_dispatch(both);
            (both.clone().narrow(0, 0, n), both.narrow(0, n, n).int())
        }
    }
}

fn composed_logits(hidden: Tensor<2>, head: &Tensor<2>, factors: Option<&Factors>) -> Tensor<2> {
    linear(Operators::Composed, hidden, head, factors, None).cast(DType::F32)
}

fn nll_of(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    log_softmax(logits, 1).gather(1, targets.unsqueeze_dim::<2>(1)).squeeze_dim::<1>(1).neg()
}

/// `x`, `W`, `low = scale x a` and `b`; the last two without elements where the head is not adapted.
fn inputs(hidden: Tensor<2>, head: &Tensor<2>, factors: Option<&Factors>) -> [Tensor<2>; 4] {
    match factors {
        None => {
            let none = Tensor::empty([0, 0], &hidden.device().inner());
            [hidden, head.clone(), none.clone(), none]
        }
        Some(factors) => {
            let low = linear(Operators::Fused, hidden.clone(), &factors.a, None, None) * factors.scale;
            [hidden, head.clone(), low, factors.b.clone()]
        }
    }
}

#[backend_extension(Flex, Autodiff)]
trait CrossEntropy: Backend {
    fn fused_token_nll(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `[2 n]`: the log-likelihoods, then the ids of the most likely tokens (whole numbers up to 2^24 are exact in f32).
    fn fused_token_scores(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// One product that goes into the logits: inputs `[n, d]` and a matrix `[d, vocab]`.
#[derive(Clone, Debug)]
struct Product {
    input: FlexTensor,
    matrix: FlexTensor,
}

/// The head's products: one, or two where it is adapted.
#[derive(Clone, Debug)]
struct Head {
    products: Vec<Product>,
    targets: Vec<usize>,
    vocab: usize,
}

impl Head {
    fn new(x: FlexTensor, weight: FlexTensor, low: FlexTensor, b: FlexTensor, targets: &FlexTensor) -> Self {
        let vocab = dims::<2>(&weight)[1];
        let mut products = vec![Product { input: contiguous(x), matrix: weight }];
        if low.layout().num_elements() > 0 {
            products.push(Product { input: contiguous(low), matrix: contiguous(b) });
        }
        let targets = indices(targets);
        Self { products, targets, vocab }
    }

    /// Runs of tokens whose logits are held together: whole panels but for the last.
    fn chunks(&self) -> impl Iterator<Item = Chunk> {
        let n = self.targets.len();
        let most = (CHUNK_LOGITS / self.vocab / PANEL).clamp(1, 64) * PANEL;
        (0..n).step_by(most).map(move |first| Chunk { first, n: most.min(n - first) })
    }

    /// The logits of a chunk and their summary.
    fn logits(&self, chunk: Chunk) -> Logits {
        let across: Vec<Panels> = self.products.iter().map(|p| chunk.rows(&p.input).transposed().panels()).collect();
        let n_panels = chunk.n.div_ceil(PANEL);
        let n_blocks = self.vocab.div_ceil(VOCABULARY);
        let mut values = Buffer::take(n_blocks * n_panels * VOCABULARY * PANEL);
        let mut parts = vec![Part::default(); n_blocks * n_panels];
        let blocks = values.par_chunks_mut(n_panels * VOCABULARY * PANEL).zip(parts.par_chunks_mut(n_panels));
        blocks.enumerate().for_each(|(i, (block, parts))| {
            let rows: Vec<Rows<'_>> = self.products.iter().map(|p| Rows::of_block(&p.matrix, i)).collect();
            let n_rows = rows[0].matrix().n_rows;
            for (p, (panel, part)) in block.chunks_exact_mut(VOCABULARY * PANEL).zip(parts).enumerate() {
                let terms: Vec<Term<'_>> =
                    rows.iter().zip(&across).map(|(r, x)| (r.matrix().into(), x.view().whole_panel(p))).collect();
                let panel = &mut panel[..n_rows * PANEL];
                multiply_here(&terms, Onto::Zero, panel, PANEL);
                summarise(panel, part);
                part.best.iter_mut().for_each(|best| *best += (i * VOCABULARY) as u32);
            }
        });
        Logits { values, n_panels, n_blocks, parts }
    }

    /// Log-likelihood, logarithm of the sum and most likely token of each of a chunk's places.
    fn score(&self, chunk: Chunk, logits: &Logits, nll: &mut [f32], log_sums: &mut [f32], best: &mut [f32]) {
        for i in 0..chunk.n {
            let (panel, lane) = (i / PANEL, i % PANEL);
            let parts = || logits.parts.iter().skip(panel).step_by(logits.n_panels);
            // The first of equals, as argmax gives.
            let top = parts().fold((f32::NEG_INFINITY, 0), |top, part| match part.largest[lane] > top.0 {
                true => (part.largest[lane], part.best[lane]),
                false => top,
            });
            let sum: f64 = parts().map(|p| f64::from(p.sum[lane]) * f64::from(p.largest[lane] - top.0).exp()).sum();
            log_sums[i] = top.0 + sum.ln() as f32;
            best[i] = top.1 as f32;
            nll[i] = log_sums[i] - logits.values[logits.place(self.targets[chunk.first + i], i)];
        }
    }

    /// `g_i (softmax - [v = t])` in the place of the logits.
    fn differentiate(&self, chunk: Chunk, logits: &mut Logits, log_sums: &[f32], g: &[f32]) {
        let padded = |x: &[f32]| -> Vec<[f32; PANEL]> {
            x.chunks(PANEL).map(|x| std::array::from_fn(|lane| x.get(lane).copied().unwrap_or(0.0))).collect()
        };
        let (sums, scales) = (padded(log_sums), padded(g));
        let n_panels = logits.n_panels;
        logits.values.par_chunks_mut(VOCABULARY * PANEL).enumerate().for_each(|(i, panel)| {
            probabilities(panel, &sums[i % n_panels], &scales[i % n_panels]);
        });
        for (i, (target, g)) in self.targets[chunk.first..][..chunk.n].iter().zip(g).enumerate() {
            let place = logits.place(*target, i);
            logits.values[place] -= g;
        }
    }

    /// Adds a chunk's `dz M^T` to the input's gradient of product `p`.
    fn input_gradient(&self, chunk: Chunk, dz: &Logits, p: usize, out: &mut [f32]) {
        let d = dims::<2>(&self.products[p].input)[1];
        // Threads share the rows of the result, each with all tokens.
        let part = d.div_ceil(2 * rayon::current_num_threads()).next_multiple_of(12);
        let mut across = Buffer::zeros(d.div_ceil(part) * part * dz.n_panels * PANEL); // [parts, panels, part, PANEL]
        let mut parts: Vec<&mut [f32]> = across.chunks_exact_mut(dz.n_panels * part * PANEL).collect();
        for block in 0..dz.n_blocks {
            let rows = Rows::of_block(&self.products[p].matrix, block);
            let left = rows.matrix().transposed(); // [d, n_rows]
            parts.par_iter_mut().enumerate().for_each(|(i, out)| {
                let left = left.rows(i * part, part.min(d - i * part));
                let turned = left.is_turned().then(|| left.strips(false));
                let left = turned.as_ref().map_or(left.into(), Strips::view);
                for (panel, out) in out.chunks_exact_mut(part * PANEL).enumerate() {
                    let n_rows = rows.matrix().n_rows;
                    let right = PanelView::new(dz.panel(block, panel, n_rows), n_rows, PANEL);
                    multiply_here(&[(left, right)], Onto::Itself, out, PANEL);
                }
            });
        }
        let of_tokens = out[chunk.first * d..(chunk.first + chunk.n) * d].par_chunks_mut(d);
        of_tokens.enumerate().for_each(|(i, row)| {
            for (p, row) in row.chunks_mut(part).enumerate() {
                let from = &across[(p * dz.n_panels + i / PANEL) * part * PANEL..][..part * PANEL];
                row.iter_mut().zip(from.iter().skip(i % PANEL).step_by(PANEL)).for_each(|(o, x)| *o = *x);
            }
        });
    }

    /// Adds a chunk's `dz^T x` to the transposed matrix's gradient of product `p`, `[vocab, d]`.
    fn matrix_gradient(&self, chunk: Chunk, dz: &Logits, p: usize, out: &mut [f32]) {
        let input = &self.products[p].input;
        let d = dims::<2>(input)[1];
        let rows = chunk.rows(input);
        let parts: Vec<Panels> = (0..chunk.n).step_by(PANEL).map(|i| rows.rows(i, PANEL.min(chunk.n - i)).panels()).collect();
        out.par_chunks_mut(VOCABULARY * d).enumerate().for_each(|(block, out)| {
            let n_rows = out.len() / d;
            let terms: Vec<Term<'_>> = parts
                .iter()
                .enumerate()
                .map(|(p, x)| (Matrix::new(dz.panel(block, p, n_rows), n_rows, x.view().n_rows(), PANEL).into(), x.view()))
                .collect();
            multiply_here(&terms, Onto::Itself, out, d);
        });
    }
}

/// Some tokens in a row.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    first: usize,
    n: usize,
}

impl Chunk {
    fn rows(self, input: &FlexTensor) -> Matrix<'_> {
        let [n, d] = dims(input);
        Matrix::new(values(input), n, d, d).rows(self.first, self.n)
    }

    fn of(self, x: &[f32]) -> &[f32] {
        &x[self.first..][..self.n]
    }

    fn of_mut(self, x: &mut [f32]) -> &mut [f32] {
        &mut x[self.first..][..self.n]
    }
}

/// A block of rows of the transposed matrix, `[n_rows, d]`, in f32.
enum Rows<'a> {
    There(Matrix<'a>),
    Widened(Buffer, usize),
}

impl<'a> Rows<'a> {
    fn of_block(matrix: &'a FlexTensor, block: usize) -> Self {
        let [d, vocab] = dims(matrix);
        let first = block * VOCABULARY;
        let n = VOCABULARY.min(vocab - first);
        match weight_of(matrix).transposed() {
            Weight::F32(rows) => Self::There(rows.rows(first, n)),
            Weight::Bf16(rows) => {
                let rows = rows.rows(first, n);
                let mut wide = Buffer::take(n * d);
                for (i, out) in wide.chunks_exact_mut(d).enumerate() {
                    out.iter_mut().enumerate().for_each(|(j, o)| *o = rows.at(i, j).widened());
                }
                Self::Widened(wide, d)
            }
        }
    }

    fn matrix(&self) -> Matrix<'_> {
        match self {
            Self::There(matrix) => *matrix,
            Self::Widened(values, d) => Matrix::new(values, values.len() / d, *d, *d),
        }
    }
}

/// What a panel of logits holds: largest value, its token, and the sum of exponentials relative to it, per token.
#[derive(Clone, Debug)]
struct Part {
    largest: [f32; PANEL],
    best: [u32; PANEL],
    sum: [f32; PANEL],
}

impl Default for Part {
    fn default() -> Self {
        Self { largest: [f32::NEG_INFINITY; PANEL], best: [0; PANEL], sum: [0.0; PANEL] }
    }
}

/// Logits of a chunk: `[blocks, panels, VOCABULARY, PANEL]`, the last block's panels filled in part.
#[derive(Debug)]
struct Logits {
    values: Buffer,
    n_panels: usize,
    n_blocks: usize,
    parts: Vec<Part>, // [blocks, panels]
}

impl Logits {
    fn place(&self, token: usize, i: usize) -> usize {
        let (block, row) = (token / VOCABULARY, token % VOCABULARY);
        ((block * self.n_panels + i / PANEL) * VOCABULARY + row) * PANEL + i % PANEL
    }

    fn panel(&self, block: usize, panel: usize, n_rows: usize) -> &[f32] {
        &self.values[(block * self.n_panels + panel) * VOCABULARY * PANEL..][..n_rows * PANEL]
    }
}

#[pulp::with_simd(summarise = pulp::Arch::new())]
#[inline(always)]
fn summarise_simd<S: Simd>(_: S, panel: &[f32], part: &mut Part) {
    let (rows, _) = panel.as_chunks::<PANEL>();
    let (mut largest, mut best) = ([f32::NEG_INFINITY; PANEL], [0_u32; PANEL]);
    for (v, row) in rows.iter().enumerate() {
        for i in 0..PANEL {
            let larger = row[i] > largest[i];
            largest[i] = if larger { row[i] } else { largest[i] };
            best[i] = if larger { v as u32 } else { best[i] };
        }
    }
    let mut sum = [0.0; PANEL];
    for row in rows {
        for i in 0..PANEL {
            sum[i] += exp(row[i] - largest[i]);
        }
    }
    *part = Part { largest, best, sum };
}

#[pulp::with_simd(probabilities = pulp::Arch::new())]
#[inline(always)]
fn probabilities_simd<S: Simd>(_: S, panel: &mut [f32], log_sums: &[f32; PANEL], scales: &[f32; PANEL]) {
    let (rows, _) = panel.as_chunks_mut::<PANEL>();
    for row in rows {
        for i in 0..PANEL {
            row[i] = exp(row[i] - log_sums[i]) * scales[i];
        }
    }
}

impl CrossEntropy for Flex {
    fn fused_token_nll(x: FlexTensor, weight: FlexTensor, low: FlexTensor, b: FlexTensor, targets: FlexTensor) -> FlexTensor {
        let head = Head::new(x, weight, low, b, &targets);
        let n = head.targets.len();
        let (mut nll, mut log_sums, mut best) = (Buffer::take(n), Buffer::take(n), Buffer::take(n));
        for c in head.chunks() {
            let logits = head.logits(c);
            head.score(c, &logits, c.of_mut(&mut nll), c.of_mut(&mut log_sums), c.of_mut(&mut best));
        }
        nll.into_tensor([n])
    }

    fn fused_token_scores(x: FlexTensor, weight: FlexTensor, low: FlexTensor, b: FlexTensor, targets: FlexTensor) -> FlexTensor {
        let head = Head::new(x, weight, low, b, &targets);
        let n = head.targets.len();
        let (mut both, mut log_sums) = (Buffer::take(2 * n), Buffer::take(n));
        let (nll, best) = both.split_at_mut(n);
        for c in head.chunks() {
            let logits = head.logits(c);
            head.score(c, &logits, c.of_mut(nll), c.of_mut(&mut log_sums), c.of_mut(best));
        }
        both.into_tensor([2 * n])
    }
}

#[derive(Debug)]
struct Gradient;

/// What the backward pass needs.
#[derive(Clone, Debug)]
enum State {
    /// The inputs' gradients for an upstream gradient of one: the head is frozen.
    Ready(Vec<FlexTensor>),
    /// Everything to compute them, the logarithms of the sums, and the logits where they are one chunk.
    Later(Head, FlexTensor, Option<Arc<Logits>>),
}

impl Backward<Flex, 4> for Gradient {
    type State = State;

    fn backward(self, ops: Ops<State, 4>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let g = contiguous(gradients.consume::<Flex>(&ops.node));
        let g = values(&g);
        let [x, weight, low, b] = ops.parents;
        let parents = [(x, weight), (low, b)];
        match ops.state {
            State::Ready(ready) => {
                for (ready, (input, _)) in ready.iter().zip(parents) {
                    let Some(node) = input else { continue };
                    let [n, d] = dims(ready);
                    let mut dx = Buffer::take(n * d);
                    let rows = dx.par_chunks_mut(d).zip(values(ready).par_chunks(d)).zip(g);
                    rows.for_each(|((dx, ready), g)| dx.iter_mut().zip(ready).for_each(|(o, x)| *o = g * x));
                    gradients.register::<Flex>(node.id, dx.into_tensor([n, d]));
                }
            }
            State::Later(head, log_sums, kept) => {
                let mut kept = kept.and_then(Arc::into_inner);
                let n = head.targets.len();
                let sizes: Vec<usize> = head.products.iter().map(|p| dims::<2>(&p.input)[1]).collect();
                let mut of_inputs: Vec<Buffer> = sizes.iter().map(|d| Buffer::zeros(n * d)).collect();
                let mut of_matrices: Vec<Option<Buffer>> =
                    sizes.iter().zip(&parents).map(|(d, (_, m))| m.is_some().then(|| Buffer::zeros(head.vocab * d))).collect();
                for c in head.chunks() {
                    let mut logits = kept.take().unwrap_or_else(|| head.logits(c));
                    head.differentiate(c, &mut logits, c.of(values(&log_sums)), c.of(g));
                    for p in 0..head.products.len() {
                        if parents[p].0.is_some() {
                            head.input_gradient(c, &logits, p, &mut of_inputs[p]);
                        }
                        if let Some(out) = &mut of_matrices[p] {
                            head.matrix_gradient(c, &logits, p, out);
                        }
                    }
                }
                for (((input, matrix), d), (of_input, of_matrix)) in
                    parents.into_iter().zip(sizes).zip(of_inputs.into_iter().zip(of_matrices))
                {
                    if let Some(node) = input {
                        gradients.register::<Flex>(node.id, of_input.into_tensor([n, d]));
                    }
                    if let (Some(node), Some(of_matrix)) = (matrix, of_matrix) {
                        gradients.register::<Flex>(node.id, of_matrix.into_tensor([head.vocab, d]).transpose(0, 1));
                    }
                }
            }
        }
    }
}

impl<C: CheckpointStrategy> CrossEntropy for Autodiff<Flex, C> {
    fn fused_token_nll(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node(), low.node(), b.node()];
        let trained = weight.is_tracked() || b.is_tracked();
        let [x, weight, low, b] = [x, weight, low, b].map(|t| t.into_primitive());
        let op = match Gradient.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(op) => return op.finish(Flex::fused_token_nll(x, weight, low, b, targets)),
            OpsKind::Tracked(op) => op,
        };
        let head = Head::new(x, weight, low, b, &targets);
        let n = head.targets.len();
        let (mut nll, mut log_sums, mut best) = (Buffer::take(n), Buffer::take(n), Buffer::take(n));
        let mut of_inputs: Vec<Buffer> = head.products.iter().map(|p| Buffer::take(n * dims::<2>(&p.input)[1])).collect();
        let ones = vec![1.0; n];
        let mut kept = None;
        for c in head.chunks() {
            let mut logits = head.logits(c);
            head.score(c, &logits, c.of_mut(&mut nll), c.of_mut(&mut log_sums), c.of_mut(&mut best));
            if !trained {
                head.differentiate(c, &mut logits, c.of(&log_sums), c.of(&ones));
                of_inputs.iter_mut().enumerate().for_each(|(p, out)| head.input_gradient(c, &logits, p, out));
            } else if c.n == n {
                kept = Some(Arc::new(logits));
            }
        }
        let state = match trained {
            true => State::Later(head, log_sums.into_tensor([n]), kept),
            false => State::Ready(
                of_inputs
                    .into_iter()
                    .map(|x| {
                        let d = x.len() / n;
                        x.into_tensor([n, d])
                    })
                    .collect(),
            ),
        };
        op.finish(state, nll.into_tensor([n]))
    }

    fn fused_token_scores(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let [x, weight, low, b] = [x, weight, low, b].map(|t| t.into_primitive());
        Self::from_inner(Flex::fused_token_scores(x, weight, low, b, targets))
    }
}
