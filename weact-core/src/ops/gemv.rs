//! One row times a matrix: what decoding does for every weight, once per token. It reads each weight once, so its time is that of
//! the memory; weights in bf16 take half of it.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::matrix::{Element, Matrix, Weight};

/// Below this many weights a second thread costs more than it saves.
const PARALLEL_FROM: usize = 1 << 17;

/// `out = x W`.
///
/// # Shapes
/// - `x`: `[d_in]`, `weight`: `[d_in, d_out]`, `out`: `[d_out]`
pub(super) fn multiply_row(x: &[f32], weight: Weight<'_>, out: &mut [f32]) {
    match weight {
        Weight::F32(matrix) => multiply_row_with(x, matrix, out),
        Weight::Bf16(matrix) => multiply_row_with(x, matrix, out),
    }
}

fn multiply_row_with<T: Element>(x: &[f32], weight: Matrix<'_, T>, out: &mut [f32]) {
    let parallel = x.len() * out.len() >= PARALLEL_FROM;
    // Outputs that one thread computes at a time.
    let chunk = if parallel { out.len().div_ceil(4 * rayon::current_num_threads()).next_multiple_of(16) } else { out.len() };
    let arch = pulp::Arch::new();
    let compute = |(i, out): (usize, &mut [f32])| {
        let first = i * chunk;
        match weight.column_major() {
            Some(columns) => arch.dispatch(Dots { x, columns: &columns[first * x.len()..], out }),
            None => arch.dispatch(Sums { x, weight, first, out }),
        }
    };
    match parallel {
        true => out.par_chunks_mut(chunk).enumerate().for_each(compute),
        false => out.chunks_mut(chunk.max(1)).enumerate().for_each(compute),
    }
}

/// `out += sum_i x_i row_i`, for a small matrix whose rows follow each other.
pub(super) fn add_rows(x: &[f32], rows: &[f32], out: &mut [f32]) {
    for (x, row) in x.iter().zip(rows.chunks_exact(out.len())) {
        out.iter_mut().zip(row).for_each(|(o, r)| *o += x * r);
    }
}

/// Each output is the product of `x` with a column that lies in one piece.
struct Dots<'a, T> {
    x: &'a [f32],
    columns: &'a [T],
    out: &'a mut [f32],
}

impl<T: Element> WithSimd for Dots<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Four runs of columns side by side: four streams keep the memory busy, and each is read in order in pages of its own,
        // which the processor sees coming.
        let (d_in, run) = (self.x.len(), self.out.len() / 4);
        let (columns, of_rest) = self.columns[..self.out.len() * d_in].split_at(4 * run * d_in);
        let (runs, rest) = self.out.split_at_mut(4 * run);
        for i in 0..run {
            let column = |j: usize| &columns[(j * run + i) * d_in..][..d_in];
            let products = four_dots(simd, self.x, [column(0), column(1), column(2), column(3)]);
            (0..4).for_each(|j| runs[j * run + i] = products[j]);
        }
        for (out, column) in rest.iter_mut().zip(of_rest.chunks_exact(d_in)) {
            [*out, ..] = four_dots(simd, self.x, [column; 4]);
        }
    }
}

/// The products of `x` with each of four columns.
#[inline(always)]
fn four_dots<S: Simd, T: Element>(simd: S, x: &[f32], [a, b, c, d]: [&[T]; 4]) -> [f32; 4] {
    let (xs, x_rest) = S::as_simd_f32s(x);
    let n = S::F32_LANES;
    let mut sums = [simd.splat_f32s(0.0); 4];
    for ((((x, a), b), c), d) in
        xs.iter().zip(a.chunks_exact(n)).zip(b.chunks_exact(n)).zip(c.chunks_exact(n)).zip(d.chunks_exact(n))
    {
        sums[0] = simd.mul_add_f32s(*x, T::vector::<S>(a), sums[0]);
        sums[1] = simd.mul_add_f32s(*x, T::vector::<S>(b), sums[1]);
        sums[2] = simd.mul_add_f32s(*x, T::vector::<S>(c), sums[2]);
        sums[3] = simd.mul_add_f32s(*x, T::vector::<S>(d), sums[3]);
    }
    let n = x.len() - x_rest.len();
    let rest = |column: &[T]| x_rest.iter().zip(&column[n..]).map(|(x, w)| x * w.widened()).sum::<f32>();
    [
        simd.reduce_sum_f32s(sums[0]) + rest(a),
        simd.reduce_sum_f32s(sums[1]) + rest(b),
        simd.reduce_sum_f32s(sums[2]) + rest(c),
        simd.reduce_sum_f32s(sums[3]) + rest(d),
    ]
}

/// Outputs whose rows of weights lie in one piece.
struct Sums<'a, T> {
    x: &'a [f32],
    weight: Matrix<'a, T>,
    first: usize,
    out: &'a mut [f32],
}

impl<T: Element> WithSimd for Sums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.out.fill(0.0);
        let columns = self.first..self.first + self.out.len();
        let part = |i: usize| &self.weight.row(i)[columns.clone()];
        let (fours, rest) = self.x.as_chunks::<4>();
        for (i, x) in fours.iter().enumerate() {
            let rows: [&[T]; 4] = std::array::from_fn(|j| part(4 * i + j));
            for ((((out, a), b), c), d) in self.out.iter_mut().zip(rows[0]).zip(rows[1]).zip(rows[2]).zip(rows[3]) {
                *out += x[0] * a.widened() + x[1] * b.widened() + (x[2] * c.widened() + x[3] * d.widened());
            }
        }
        for (i, x) in rest.iter().enumerate() {
            for (out, w) in self.out.iter_mut().zip(part(4 * fours.len() + i)) {
                *out += x * w.widened();
            }
        }
    }
}
