//! Reading Flex tensors as slices.

use burn::tensor::DType;
use burn_flex::FlexTensor;

/// Numbers that one thread takes at a time in an element-wise kernel.
const CHUNK: usize = 8192;

/// How many rows of `width` numbers one thread takes at a time.
pub(super) fn rows_at_a_time(width: usize) -> usize {
    (CHUNK / width.max(1)).max(1)
}

/// The tensor with its elements in order, copied only where they are not.
pub(super) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// The elements of a contiguous f32 tensor.
pub(super) fn values(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice::<f32>().expect("a contiguous f32 tensor")
}

/// The lengths of a tensor's dimensions.
pub(super) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    std::array::from_fn(|i| tensor.layout().shape()[i])
}

/// The elements of an integer tensor: token ids, which are not negative.
pub(super) fn indices(tensor: &FlexTensor) -> Vec<usize> {
    let tensor = contiguous(tensor.clone());
    match tensor.dtype() {
        DType::I64 => tensor.as_slice::<i64>().expect("contiguous").iter().map(|i| *i as usize).collect(),
        DType::I32 => tensor.as_slice::<i32>().expect("contiguous").iter().map(|i| *i as usize).collect(),
        other => panic!("token ids in {other:?}"),
    }
}
