package controllers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/keys"
)

// Two Secrets are children of a sale that runs: the keys of its pods, and what its checkout needs to call them. They are read
// by name, past the cache, so that the controller may neither list nor watch Secrets; nobody tells it of a change, so it
// looks as often as it applies other children.

func keysName(sale *sales.FlashSale) string     { return sale.Name + "-reserver-keys" }
func checkoutName(sale *sales.FlashSale) string { return sale.Name + "-checkout" }

// annotationKeyGeneration says of which generation the content of a Secret is.
const annotationKeyGeneration = "sales.flashsale.dev/key-generation"

// keysTries is how often a write is tried when somebody else's came first.
const keysTries = 3

// errKeysChanged says that somebody else wrote a Secret at the same moment.
var errKeysChanged = errors.New("it was changed at the same moment, will try again")

// keysInvalidError says that the Secret has no keys in it. It is not overwritten: the pods that run may know what was there.
type keysInvalidError struct {
	name string
	err  error // tells nothing of the content
}

func (e *keysInvalidError) Error() string {
	return fmt.Sprintf("Secret %s does not hold the keys of the sale: %v; restore it, or delete it, and new ones are made", e.name, e.err)
}

// makeKeys makes both Secrets, and rotates the keys when the spec asks for a later generation than theirs.
func (s *scope) makeKeys(ctx context.Context) error {
	memo := s.key(child{kind: "Secret", name: keysName(s.sale)})
	if s.applied.fresh(memo, strconv.FormatInt(s.sale.Spec.Admission.KeyGeneration, 10)) {
		return nil
	}
	var err error
	for range keysTries {
		var set keys.Set
		// The pods first: they are to know a token before the checkout uses it.
		if set, err = s.makeReserverKeys(ctx); err == nil {
			err = s.makeCheckout(ctx, set)
		}
		if !errors.Is(err, errKeysChanged) {
			break
		}
	}
	if err != nil {
		s.applied.forget(memo)
	}
	return err
}

func (s *scope) makeReserverKeys(ctx context.Context) (keys.Set, error) {
	want := s.sale.Spec.Admission.KeyGeneration
	secret, err := s.ownSecret(ctx, keysName(s.sale))
	if err != nil {
		return keys.Set{}, err
	}
	set := keys.New(want)
	if secret.ResourceVersion != "" {
		if set, err = keys.Decode(secret.Data[keys.FileName]); err != nil {
			return set, &keysInvalidError{secret.Name, err}
		}
		if set.Generation >= want {
			return set, nil
		}
		set = set.Rotate(want)
	}
	return set, s.writeSecret(ctx, secret, "reserver", set.Generation, map[string][]byte{keys.FileName: set.Encode()})
}

func (s *scope) makeCheckout(ctx context.Context, set keys.Set) error {
	secret, err := s.ownSecret(ctx, checkoutName(s.sale))
	if err != nil {
		return err
	}
	want := map[string][]byte{
		"token":    []byte(set.Current.CheckoutToken),
		"url":      []byte(endpoint(s.sale)),
		"jwks-url": []byte(endpoint(s.sale) + "/.well-known/jwks.json"),
	}
	if equality.Semantic.DeepEqual(secret.Data, want) {
		return nil
	}
	return s.writeSecret(ctx, secret, "checkout", set.Generation, want)
}

// ownSecret reads a Secret of the sale; one that is not there has no resourceVersion.
func (s *scope) ownSecret(ctx context.Context, name string) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	err := s.Direct.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: name}, secret)
	if apierrors.IsNotFound(err) {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: s.sale.Namespace}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking for Secret %s: %w", name, err)
	}
	if !ours(secret, s.sale) {
		return nil, &nameTakenError{"Secret", name}
	}
	return secret, nil
}

// writeSecret makes the Secret, or changes it if it is still as it was read.
func (s *scope) writeSecret(ctx context.Context, secret *corev1.Secret, component string, generation int64, data map[string][]byte) error {
	secret.Data = data
	if secret.Labels == nil {
		secret.Labels = map[string]string{}
	}
	maps.Copy(secret.Labels, s.labels(component))
	if secret.Annotations == nil {
		secret.Annotations = map[string]string{}
	}
	secret.Annotations[annotationKeyGeneration] = strconv.FormatInt(generation, 10)
	var err error
	var changed bool
	if secret.ResourceVersion == "" {
		err = s.Create(ctx, secret, fieldOwner)
		changed = apierrors.IsAlreadyExists(err)
	} else {
		err = s.Update(ctx, secret, fieldOwner)
		changed = apierrors.IsConflict(err) || apierrors.IsNotFound(err)
	}
	switch {
	case changed:
		return fmt.Errorf("writing Secret %s: %w", secret.Name, errKeysChanged)
	case err != nil:
		return fmt.Errorf("writing Secret %s: %w", secret.Name, err)
	}
	log.FromContext(ctx).Info("wrote keys", "secret", secret.Name, "generation", generation)
	return nil
}

// removeKeys takes both Secrets away. That there are none is remembered for a while, like what was applied.
func (s *scope) removeKeys(ctx context.Context) error {
	memo := s.key(child{kind: "Secret", name: keysName(s.sale)})
	if s.applied.fresh(memo, "none") {
		return nil
	}
	var failed error
	for _, name := range []string{checkoutName(s.sale), keysName(s.sale)} {
		failed = errors.Join(failed, s.removeSecret(ctx, name))
	}
	if failed != nil {
		s.applied.forget(memo)
	}
	return failed
}

func (s *scope) removeSecret(ctx context.Context, name string) error {
	secret, err := s.ownSecret(ctx, name)
	var taken *nameTakenError
	switch {
	case errors.As(err, &taken):
		return nil
	case err != nil:
		return err
	case secret.ResourceVersion == "", !secret.DeletionTimestamp.IsZero():
		return nil
	}
	uid := secret.UID
	if err := s.Delete(ctx, secret, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("removing Secret %s: %w", name, err)
	}
	return nil
}

func (s *scope) forgetKeys() { s.applied.forget(s.key(child{kind: "Secret", name: keysName(s.sale)})) }
