//! Causal attention with grouped queries over sequences that are laid out one after another (block-diagonal packing):
//!
//! `o_i = sum_j p_ij v_j`, `p_ij = exp(s_ij - l_i)`, `s_ij = q_i . k_j / sqrt(head_dim)`, `l_i = log sum_j exp(s_ij)`
//!
//! over the keys `j` of `i`'s own sequence at or before `i`. The CPU body takes a block of queries at a time with all keys that
//! they see, so memory is a block of scores per thread and never a matrix of scores. Backward computes the scores again from `q`,
//! `k` and `l` (<https://arxiv.org/abs/2205.14135>): `dv_j = sum_i p_ij g_i`, `ds_ij = p_ij (g_i . v_j - g_i . o_i)`,
//! `dq_i = sum_j ds_ij k_j / sqrt(head_dim)`, `dk_j = sum_i ds_ij q_i / sqrt(head_dim)`. Keeps `q`, `k`, `v`, `o` and `l`.

use std::sync::Arc;

use burn::{
    backend::{
        Autodiff, Backend, Dispatch, Flex,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{Tensor, TensorData, activation::softmax},
};
use burn_flex::FlexTensor;
use pulp::Simd;
use rayon::prelude::*;

use super::{
    Operators,
    buffer::Buffer,
    flex::{contiguous, rows_at_a_time, values},
    matrix::{Matrix, PANEL, PanelView, Panels},
    product::{Onto, multiply_here},
    simd,
};

/// Queries whose scores are held at a time.
const BLOCK: usize = 48;

/// How heads are cut from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; each serves `n_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Numbers per head.
    pub head_dim: usize,
}

/// One sequence of a batch: its new positions are the last `n_new` of its `n_keys`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Positions that ask.
    pub n_new: usize,
    /// Positions that are seen, the new ones included.
    pub n_keys: usize,
}

/// Each new position's mix of the values that it sees.
///
/// # Shapes
/// - `q` and output: `[new positions of all sequences, n_heads * head_dim]`, f32
/// - `k`, `v`: `[positions of all sequences, n_kv_heads * head_dim]`, f32
pub fn attention(operators: Operators, [q, k, v]: [Tensor<2>; 3], heads: Heads, sequences: &Arc<[Sequence]>) -> Tensor<2> {
    match operators {
        Operators::Composed => composed([q, k, v], heads, sequences),
        Operators::Fused => Tensor::from_dispatch(<Dispatch as Attention>::fused_attention(
            q.into_dispatch(),
            k.into_dispatch(),
            v.into_dispatch(),
            heads,
            sequences.clone(),
        )),
    }
}

fn composed([q, k, v]: [Tensor<2>; 3], heads: Heads, sequences: &[Sequence]) -> Tensor<2> {
    let Heads { n_heads, n_kv_heads, head_dim } = heads;
    // Runs of equal sequences are one batch.
    let runs = sequences.chunk_by(|a, b| a == b);
    let (mut first_query, mut first_key) = (0, 0);
    let one = |run: &[Sequence]| {
        let (batch, Sequence { n_new, n_keys }) = (run.len(), run[0]);
        let part = |x: &Tensor<2>, first: usize, len: usize, n: usize| {
            x.clone().narrow(0, first, batch * len).reshape([batch, len, n, head_dim]).swap_dims(1, 2)
        };
        let q = part(&q, first_query, n_new, n_heads); // [batch, heads, n_new, head_dim]
        let (k, v) = (part(&k, first_key, n_keys, n_kv_heads), part(&v, first_key, n_keys, n_kv_heads));
        (first_query, first_key) = (first_query + batch * n_new, first_key + batch * n_keys);
        // Queries of one group are rows of one product with their shared keys, so keys are never copied per head.
        let rows = n_heads / n_kv_heads * n_new;
        let q = (q * (1.0 / (head_dim as f64).sqrt())).reshape([batch, n_kv_heads, rows, head_dim]);
        let mut scores = q.matmul(k.swap_dims(2, 3)); // [batch, kv_heads, rows, n_keys]
        if n_new > 1 {
            let by_head = scores.reshape([batch, n_heads, n_new, n_keys]);
            let hidden = causal_mask(run[0], &by_head.device());
            scores = (by_head + hidden).reshape([batch, n_kv_heads, rows, n_keys]);
        }
        let mixed = softmax(scores, 3).matmul(v).reshape([batch, n_heads, n_new, head_dim]);
        mixed.swap_dims(1, 2).reshape([batch * n_new, n_heads * head_dim])
    };
    let mut parts: Vec<Tensor<2>> = runs.map(one).collect();
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
}

/// 0 where a key is at or before the query's position, a large negative number after it: `[1, 1, n_new, n_keys]`.
fn causal_mask(Sequence { n_new, n_keys }: Sequence, device: &burn::tensor::Device) -> Tensor<4> {
    let past = n_keys - n_new;
    let values: Vec<f32> = (0..n_new).flat_map(|i| (0..n_keys).map(move |j| if j > past + i { -1e30 } else { 0.0 })).collect();
    Tensor::from_data(TensorData::new(values, [1, 1, n_new, n_keys]), device)
}

#[backend_extension(Flex, Autodiff)]
trait Attention: Backend {
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        heads: Heads,
        sequences: Arc<[Sequence]>,
    ) -> FloatTensor<Self>;
}

impl Attention for Flex {
    fn fused_attention(q: FlexTensor, k: FlexTensor, v: FlexTensor, heads: Heads, sequences: Arc<[Sequence]>) -> FlexTensor {
        forward([q, k, v].map(contiguous), heads, &sequences).0
    }
}

/// Rows of one head, as a matrix `[n, head_dim]` in rows of `n_heads` heads.
fn head_rows(rows: &[f32], heads_per_row: usize, head_dim: usize, head: usize, first: usize, n: usize) -> Matrix<'_> {
    let stride = heads_per_row * head_dim;
    Matrix::new(&rows[(first * stride + head * head_dim).min(rows.len())..], n, head_dim, stride)
}

/// A sequence with the places of its first query and key.
#[derive(Clone, Copy)]
struct Placed {
    sequence: Sequence,
    first_query: usize,
    first_key: usize,
}

impl Placed {
    fn all(sequences: &[Sequence]) -> Vec<Self> {
        let (mut first_query, mut first_key) = (0, 0);
        let place = |s: &Sequence| {
            let placed = Self { sequence: *s, first_query, first_key };
            (first_query, first_key) = (first_query + s.n_new, first_key + s.n_keys);
            placed
        };
        sequences.iter().map(place).collect()
    }

    /// How many keys the new position `i` sees.
    fn seen(&self, i: usize) -> usize {
        self.sequence.n_keys - self.sequence.n_new + i + 1
    }
}

/// The output and `l`, `[n, n_heads]`.
fn forward([q, k, v]: [FlexTensor; 3], heads: Heads, sequences: &[Sequence]) -> (FlexTensor, Buffer) {
    let Heads { n_heads, n_kv_heads, head_dim } = heads;
    let width = n_heads * head_dim;
    let n: usize = sequences.iter().map(|s| s.n_new).sum();
    let (qs, ks, vs) = (values(&q), values(&k), values(&v));
    let placed = Placed::all(sequences);
    let pack = |i: usize| {
        let (placed, head) = (placed[i / n_kv_heads], i % n_kv_heads);
        let rows = |x| head_rows(x, n_kv_heads, head_dim, head, placed.first_key, placed.sequence.n_keys);
        (rows(ks).transposed().panels(), rows(vs).panels())
    };
    let packed: Vec<(Panels, Panels)> = (0..placed.len() * n_kv_heads).into_par_iter().map(pack).collect();

    let mut out = Buffer::take(n * width);
    let mut log_sums = Buffer::take(n * n_heads);
    let mut blocks = Vec::new();
    let (mut out_rest, mut sums_rest) = (&mut *out, &mut *log_sums);
    for (s, placed) in placed.iter().enumerate() {
        for first in (0..placed.sequence.n_new).step_by(BLOCK) {
            let n = BLOCK.min(placed.sequence.n_new - first);
            let (rows, sums);
            (rows, out_rest) = out_rest.split_at_mut(n * width);
            (sums, sums_rest) = sums_rest.split_at_mut(n * n_heads);
            blocks.push((s, first, n, rows, sums));
        }
    }
    let one_block = |(s, first, n, out, sums): (usize, usize, usize, &mut [f32], &mut [f32])| {
        let placed: Placed = placed[s];
        let mut scores = Scores::new(placed, first, n);
        for head in 0..n_heads {
            let (keys, values) = &packed[s * n_kv_heads + head / (n_heads / n_kv_heads)];
            let queries = head_rows(qs, n_heads, head_dim, head, placed.first_query + first, n);
            scores.fill(queries, keys.view());
            for i in 0..n {
                let (row, seen) = scores.row(i);
                sums[i * n_heads + head] = softmax_row(row, seen, scale(head_dim));
            }
            multiply_here(&[(scores.matrix().into(), values.view())], Onto::Zero, &mut out[head * head_dim..], width);
        }
    };
    blocks.into_par_iter().for_each(one_block);
    (out.into_tensor([n, width]), log_sums)
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// Scores of a block of queries of one sequence with the keys that its last query sees.
struct Scores {
    values: Buffer,
    n: usize,
    n_keys: usize,
    stride: usize,
    first_seen: usize,
}

impl Scores {
    fn new(placed: Placed, first: usize, n: usize) -> Self {
        let n_keys = placed.seen(first + n - 1);
        let stride = n_keys.next_multiple_of(PANEL);
        Self { values: Buffer::take(n * stride), n, n_keys, stride, first_seen: placed.seen(first) }
    }

    /// `rows right`, where `right` has a column per key.
    fn fill(&mut self, rows: Matrix<'_>, right: PanelView<'_>) {
        multiply_here(&[(rows.into(), right.first_columns(self.n_keys))], Onto::Zero, &mut self.values, self.stride);
    }

    /// Row `i` and how many keys its query sees.
    fn row(&mut self, i: usize) -> (&mut [f32], usize) {
        (&mut self.values[i * self.stride..][..self.n_keys], self.first_seen + i)
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(&self.values, self.n, self.n_keys, self.stride)
    }
}

/// Makes probabilities of the first `seen` scores and zeros of the rest; returns the logarithm of the sum.
#[pulp::with_simd(softmax_row = pulp::Arch::new())]
#[inline(always)]
fn softmax_row_simd<S: Simd>(_: S, row: &mut [f32], seen: usize, scale: f32) -> f32 {
    let (row, hidden) = row.split_at_mut(seen);
    hidden.fill(0.0);
    let largest = simd::max(row) * scale;
    let mut sums = [0.0_f32; 16];
    let (chunks, rest) = row.as_chunks_mut::<16>();
    for chunk in chunks {
        for i in 0..16 {
            chunk[i] = simd::exp(chunk[i] * scale - largest);
            sums[i] += chunk[i];
        }
    }
    for (x, sum) in rest.iter_mut().zip(&mut sums) {
        *x = simd::exp(*x * scale - largest);
        *sum += *x;
    }
    let sum: f32 = sums.iter().sum();
    let inverse = 1.0 / sum;
    row.iter_mut().for_each(|x| *x *= inverse);
    largest + sum.ln()
}

/// Makes probabilities of scores whose sum's logarithm is known.
#[pulp::with_simd(probabilities = pulp::Arch::new())]
#[inline(always)]
fn probabilities_simd<S: Simd>(_: S, row: &mut [f32], seen: usize, scale: f32, log_sum: f32) {
    let (row, hidden) = row.split_at_mut(seen);
    hidden.fill(0.0);
    row.iter_mut().for_each(|x| *x = simd::exp(*x * scale - log_sum));
}

/// `p (d - along) scale` in `d`'s place.
#[pulp::with_simd(score_gradient = pulp::Arch::new())]
#[inline(always)]
fn score_gradient_simd<S: Simd>(_: S, p: &[f32], d: &mut [f32], along: f32, scale: f32) {
    d.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - along) * scale);
}

#[derive(Debug)]
struct Gradient;

#[derive(Clone, Debug)]
struct State {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    out: FlexTensor,
    log_sums: FlexTensor,
    heads: Heads,
    sequences: Arc<[Sequence]>,
}

impl Backward<Flex, 3> for Gradient {
    type State = State;

    fn backward(self, ops: Ops<State, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let g = contiguous(gradients.consume::<Flex>(&ops.node));
        let state = ops.state;
        let Heads { n_heads, n_kv_heads, head_dim } = state.heads;
        let placed = Placed::all(&state.sequences);
        // Each head of each sequence on its own: its keys' gradients are added up over the group afterwards, in order.
        let tasks = (0..placed.len() * n_heads).into_par_iter();
        let by_head: Vec<[Buffer; 3]> =
            tasks.map(|i| head_gradient(&state, placed[i / n_heads], i % n_heads, values(&g))).collect();

        let gather = |n_per_row: usize, which: usize, n: usize| {
            let mut rows = Buffer::take(n * n_per_row * head_dim);
            let mut start = 0;
            for (s, placed) in placed.iter().enumerate() {
                let n = if which == 0 { placed.sequence.n_new } else { placed.sequence.n_keys };
                let len = n * n_per_row * head_dim;
                let chunk = rows_at_a_time(n_per_row * head_dim);
                let parts = rows[start..start + len].par_chunks_mut(chunk * n_per_row * head_dim).enumerate();
                parts.for_each(|(c, rows)| {
                    for (i, row) in rows.chunks_exact_mut(n_per_row * head_dim).enumerate() {
                        let from = (c * chunk + i) * head_dim;
                        for (head, out) in row.chunks_exact_mut(head_dim).enumerate() {
                            let members = n_heads / n_per_row;
                            let parts = &by_head[s * n_heads + head * members..][..members];
                            out.copy_from_slice(&parts[0][which][from..from + head_dim]);
                            for part in &parts[1..] {
                                out.iter_mut().zip(&part[which][from..]).for_each(|(o, x)| *o += x);
                            }
                        }
                    }
                });
                start += len;
            }
            rows.into_tensor([n, n_per_row * head_dim])
        };
        let n_new: usize = state.sequences.iter().map(|s| s.n_new).sum();
        let n_keys: usize = state.sequences.iter().map(|s| s.n_keys).sum();
        let shapes = [(n_heads, n_new), (n_kv_heads, n_keys), (n_kv_heads, n_keys)];
        for (which, (parent, (n_per_row, n))) in ops.parents.into_iter().zip(shapes).enumerate() {
            if let Some(node) = parent {
                gradients.register::<Flex>(node.id, gather(n_per_row, which, n));
            }
        }
    }
}

/// The gradients of one query head's queries and of its share of keys and values, each `[n, head_dim]`.
fn head_gradient(state: &State, placed: Placed, head: usize, g: &[f32]) -> [Buffer; 3] {
    let Heads { n_heads, n_kv_heads, head_dim } = state.heads;
    let Sequence { n_new, n_keys } = placed.sequence;
    let kv_head = head / (n_heads / n_kv_heads);
    let (qs, outs, log_sums) = (values(&state.q), values(&state.out), values(&state.log_sums));
    let of_keys = |x| head_rows(x, n_kv_heads, head_dim, kv_head, placed.first_key, n_keys);
    let (keys, vals) = (of_keys(values(&state.k)), of_keys(values(&state.v)));
    let (keys_across, values_across, key_rows) = (keys.transposed().panels(), vals.transposed().panels(), keys.panels());
    let mut dq = Buffer::take(n_new * head_dim);
    let (mut dk, mut dv) = (Buffer::zeros(n_keys * head_dim), Buffer::zeros(n_keys * head_dim));
    let scale = scale(head_dim);
    for first in (0..n_new).step_by(BLOCK) {
        let n = BLOCK.min(n_new - first);
        let rows = |x| head_rows(x, n_heads, head_dim, head, placed.first_query + first, n);
        let (queries, upstream, out) = (rows(qs), rows(g), rows(outs));
        let (mut p, mut ds) = (Scores::new(placed, first, n), Scores::new(placed, first, n));
        p.fill(queries, keys_across.view());
        ds.fill(upstream, values_across.view());
        for i in 0..n {
            let (row, seen) = p.row(i);
            probabilities(row, seen, scale, log_sums[(placed.first_query + first + i) * n_heads + head]);
            let along: f32 = upstream.row(i).iter().zip(out.row(i)).map(|(g, o)| g * o).sum();
            score_gradient(row, ds.row(i).0, along, scale);
        }
        multiply_here(&[(ds.matrix().into(), key_rows.view())], Onto::Zero, &mut dq[first * head_dim..], head_dim);
        multiply_here(&[(p.matrix().transposed().into(), upstream.panels().view())], Onto::Itself, &mut dv, head_dim);
        multiply_here(&[(ds.matrix().transposed().into(), queries.panels().view())], Onto::Itself, &mut dk, head_dim);
    }
    [dq, dk, dv]
}

impl<C: CheckpointStrategy> Attention for Autodiff<Flex, C> {
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        heads: Heads,
        sequences: Arc<[Sequence]>,
    ) -> FloatTensor<Self> {
        let nodes = [q.node(), k.node(), v.node()];
        let [q, k, v] = [q, k, v].map(|t| contiguous(t.into_primitive()));
        let (out, log_sums) = forward([q.clone(), k.clone(), v.clone()], heads, &sequences);
        match Gradient.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(op) => op.finish(out),
            OpsKind::Tracked(op) => {
                let shape = [log_sums.len() / heads.n_heads, heads.n_heads];
                let log_sums = log_sums.into_tensor(shape);
                op.finish(State { q, k, v, out: out.clone(), log_sums, heads, sequences }, out)
            }
        }
    }
}
