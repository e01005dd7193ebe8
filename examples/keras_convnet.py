"""Keras' own "Simple MNIST convnet" on real handwritten digits: one line is Unisono's besides its import.

    python examples/keras_convnet.py                      one worker
    unisono run -n 3 examples/keras_convnet.py            three workers, the same weights to the last bit

Nothing is downloaded: the 1797 digits of scikit-learn are made as large as MNIST's. Needs
pip install '.[examples,keras]' in a clone.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import unisono

keras.utils.set_random_seed(0)

# Model / data parameters
num_classes = 10
input_shape = (28, 28, 1)

# Load the data and split it between train and test sets
digits = load_digits()
images = np.pad(digits.images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
(x_train, y_train), (x_test, y_test) = (images[:1497], digits.target[:1497]), (images[1497:], digits.target[1497:])

# Scale images to the [0, 1] range
x_train = x_train.astype("float32") / 16
x_test = x_test.astype("float32") / 16
# Make sure images have shape (28, 28, 1)
x_train = np.expand_dims(x_train, -1)
x_test = np.expand_dims(x_test, -1)

# convert class vectors to binary class matrices
y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)
model = unisono.keras.Model(model)

batch_size = 128
epochs = 5

model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])

model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, validation_split=0.1, verbose=2)

score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
