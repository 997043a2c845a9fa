package controllers

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/keys"
	"flashsale.dev/operator/test/testmysql"
)

// keys waits for the pods' keys and reads them.
func (w *world) keys(sale *sales.FlashSale) keys.Set {
	w.t.Helper()
	secret := &corev1.Secret{}
	w.child(secret, keysName(sale))
	set, err := keys.Decode(secret.Data[keys.FileName])
	if err != nil {
		w.t.Fatal(err)
	}
	return set
}

func (w *world) patchKeys(sale *sales.FlashSale, change func(*corev1.Secret)) {
	w.t.Helper()
	secret := &corev1.Secret{}
	w.child(secret, keysName(sale))
	before := secret.DeepCopy()
	change(secret)
	if err := k8s.Patch(ctx, secret, client.MergeFrom(before)); err != nil {
		w.t.Fatal(err)
	}
}

// checkout waits until the checkout's Secret has a token.
func (w *world) checkout(sale *sales.FlashSale, token string) *corev1.Secret {
	w.t.Helper()
	secret := &corev1.Secret{}
	testmysql.Eventually(w.t, "the checkout has the token", func() bool {
		return k8s.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: checkoutName(sale)}, secret) == nil && string(secret.Data["token"]) == token
	})
	return secret
}

// lookAgain makes the controller look at its children as if the last time was long ago.
func (m *managed) lookAgain(sale *sales.FlashSale) {
	m.reconciler.applied.forget(string(sale.UID) + "/Secret/" + keysName(sale))
}

func TestKeysAreMadeAndRotated(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.manage()
	sale := w.makeSale("keyed", 5, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	first := w.keys(sale)
	if first.Generation != 0 || first.Previous != nil {
		t.Errorf("the first keys are of generation %d, with earlier ones: %t", first.Generation, first.Previous != nil)
	}
	endpoint := "http://keyed-reserver." + w.namespace + ".svc"
	checkout := w.checkout(sale, first.Current.CheckoutToken)
	if data := checkout.Data; len(data) != 3 || string(data["url"]) != endpoint || string(data["jwks-url"]) != endpoint+"/.well-known/jwks.json" {
		t.Errorf("the checkout's Secret has %v, url %s, jwks-url %s", slices.Sorted(maps.Keys(data)), data["url"], data["jwks-url"])
	}
	pods := &corev1.Secret{}
	w.child(pods, keysName(sale))
	for _, secret := range []*corev1.Secret{pods, checkout} {
		if !ours(secret, sale) || len(secret.OwnerReferences) != 0 || secret.Annotations[annotationKeyGeneration] != "0" || len(secret.Annotations) != 1 {
			t.Errorf("Secret %s has labels %v, annotations %v, owners %v", secret.Name, secret.Labels, secret.Annotations, secret.OwnerReferences)
		}
	}
	d := &appsv1.Deployment{}
	w.child(d, reserverName(sale))
	volumes := d.Spec.Template.Spec.Volumes
	if i := slices.IndexFunc(volumes, func(v corev1.Volume) bool { return v.Name == "keys" }); i < 0 || volumes[i].Secret.SecretName != keysName(sale) ||
		*volumes[i].Secret.DefaultMode != 0o440 || volumes[i].Secret.Optional != nil {
		t.Errorf("volumes %+v", volumes)
	}
	mounts := d.Spec.Template.Spec.Containers[0].VolumeMounts
	if !slices.ContainsFunc(mounts, func(m corev1.VolumeMount) bool {
		return m.Name == "keys" && m.MountPath == "/etc/flashsale/keys" && m.ReadOnly
	}) {
		t.Errorf("mounts %+v", mounts)
	}

	before := len(m.written())
	w.patch(sale, func() { sale.Spec.Admission.KeyGeneration = 3 })
	w.seenSpec(sale)
	second := w.keys(sale)
	if second.Generation != 3 || second.Previous == nil || *second.Previous != first.Current || second.Current != first.Next || second.Next == first.Next {
		t.Errorf("rotated once to generation %d: the current ones are the previous %t, the next ones current %t", second.Generation,
			second.Previous != nil && *second.Previous == first.Current, second.Current == first.Next)
	}
	if checkout = w.checkout(sale, first.Next.CheckoutToken); checkout.Annotations[annotationKeyGeneration] != "3" {
		t.Errorf("the checkout's Secret is of generation %s", checkout.Annotations[annotationKeyGeneration])
	}
	template := d.Spec.Template.DeepCopy()
	if w.child(d, reserverName(sale)); d.Generation != 1 || len(template.Annotations) != len(d.Spec.Template.Annotations) {
		t.Errorf("a rotation replaces the pods: the Deployment is of generation %d", d.Generation)
	}
	var secrets []string
	for _, write := range m.written()[before:] {
		if strings.Contains(write, "secrets") {
			secrets = append(secrets, write)
		}
	}
	if !slices.Equal(secrets, []string{"PUT secrets/keyed-reserver-keys", "PUT secrets/keyed-checkout"}) { // pods know a token before it is used
		t.Errorf("the writes of a rotation: %q", secrets)
	}

	// Nothing more is written, also by a controller that begins anew.
	m.kill()
	m = w.manage()
	w.patch(sale, func() { sale.Spec.Admission.MaxInFlight = 100 })
	w.seenSpec(sale)
	m.lookAgain(sale)
	w.patch(sale, func() { sale.Spec.Admission.MaxInFlight = 200 })
	w.seenSpec(sale)
	if third := w.keys(sale); third.Current != second.Current || third.Next != second.Next {
		t.Error("the keys changed though nobody asked")
	}
	for _, write := range m.written() {
		if strings.Contains(write, "secrets") {
			t.Errorf("a write %s though nobody asked", write)
		}
	}
}

// What somebody took away or changed comes back, with what is still known.
func TestKeysAreMended(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.manage()
	sale := w.makeSale("mended", 5, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	first := w.keys(sale)
	checkout := w.checkout(sale, first.Current.CheckoutToken)
	if err := k8s.Delete(ctx, checkout); err != nil {
		t.Fatal(err)
	}
	m.lookAgain(sale)
	checkout = w.checkout(sale, first.Current.CheckoutToken)
	checkout.Data["token"] = []byte("changed")
	if err := k8s.Update(ctx, checkout); err != nil {
		t.Fatal(err)
	}
	m.lookAgain(sale)
	w.checkout(sale, first.Current.CheckoutToken)
	if err := k8s.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: keysName(sale), Namespace: w.namespace}}); err != nil {
		t.Fatal(err)
	}
	m.lookAgain(sale)
	second := w.keys(sale)
	if second.Current == first.Current {
		t.Error("keys that are gone came back")
	}
	w.checkout(sale, second.Current.CheckoutToken)

	// Something else in their place: it is said, and left alone.
	m.lookAgain(sale)
	w.patchKeys(sale, func(secret *corev1.Secret) { secret.Data[keys.FileName] = []byte(`{"generation": "fsc_oops"}`) })
	m.lookAgain(sale)
	w.eventually(sale, "the fault is named", func() bool { return readyReason(sale) == sales.ReasonKeysInvalid })
	c := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionReserversAvailable)
	if !meta.IsStatusConditionTrue(sale.Status.Conditions, sales.ConditionStalled) || !strings.Contains(c.Message, "Secret mended-reserver-keys") || strings.Contains(c.Message, "fsc_oops") {
		t.Errorf("ReserversAvailable says %+v", c)
	}
	w.patchKeys(sale, func(secret *corev1.Secret) {
		if string(secret.Data[keys.FileName]) != `{"generation": "fsc_oops"}` {
			t.Error("it was overwritten")
		}
		secret.Data[keys.FileName] = second.Encode()
	})
	w.eventually(sale, "it is mended", func() bool { return readyReason(sale) == sales.ReasonUnavailable })
	w.checkout(sale, second.Current.CheckoutToken)
}

// A Secret of somebody else is neither overwritten, nor mounted, nor taken away.
func TestASecretOfSomebodyElse(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"taken-reserver-keys", "taken-checkout"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			other := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: w.namespace}, StringData: map[string]string{"token": "theirs"}}
			if err := k8s.Create(ctx, other); err != nil {
				t.Fatal(err)
			}
			w.manage()
			sale := w.makeSale("taken", 1, -time.Second).In(w)
			w.eventually(sale, "the conflict is named", func() bool { return readyReason(sale) == sales.ReasonNameConflict })
			if c := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionReserversAvailable); !strings.Contains(c.Message, "Secret "+name+" exists and belongs to somebody else") {
				t.Errorf("ReserversAvailable says %+v", c)
			}
			if slices.Contains(w.children(), "Deployment/"+reserverName(sale)) {
				t.Error("pods are made all the same")
			}
			if err := k8s.Get(ctx, client.ObjectKeyFromObject(other), other); err != nil || string(other.Data["token"]) != "theirs" || len(other.Labels) != 0 {
				t.Errorf("it was changed: %v, labels %v", err, other.Labels)
			}
			if err := k8s.Delete(ctx, other); err != nil {
				t.Fatal(err)
			}
			w.eventually(sale, "the name is free, and taken", func() bool { return readyReason(sale) == sales.ReasonUnavailable && len(w.children()) == usual })
			w.buy(sale, "ann")
			w.waitFor(sale, sales.PhaseClosed)
			testmysql.Eventually(t, "the children are gone", func() bool { return len(w.children()) == 0 })
		})
	}
}

// While the sale runs not, a Secret of the name may be somebody else's, and stays.
func TestASecretOfSomebodyElseStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "later-checkout", Namespace: w.namespace}}
	if err := k8s.Create(ctx, other); err != nil {
		t.Fatal(err)
	}
	w.manage()
	sale := w.makeSale("later", 1, time.Hour).In(w)
	w.waitFor(sale, sales.PhaseScheduled)
	if err := k8s.Delete(ctx, sale); err != nil {
		t.Fatal(err)
	}
	w.gone(sale)
	if err := k8s.Get(ctx, client.ObjectKeyFromObject(other), other); err != nil {
		t.Error(err)
	}
}

// Somebody else writes a Secret between the controller's read and its write: it reads again.
func TestKeysChangedAtTheSameMoment(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var once atomic.Bool
	sale := w.makeSale("raced", 1, -time.Second)
	w.manage(func(m *managed) {
		m.step = func(what string, write func() (*http.Response, error)) (*http.Response, error) {
			if what == "PUT secrets/raced-reserver-keys" && once.CompareAndSwap(false, true) {
				w.patchKeys(sale.FlashSale, func(secret *corev1.Secret) { secret.Annotations["note"] = "x" })
			}
			return write()
		}
	})
	sale.In(w)
	w.waitFor(sale.FlashSale, sales.PhaseLive)
	first := w.keys(sale.FlashSale)
	w.patch(sale.FlashSale, func() { sale.Spec.Admission.KeyGeneration = 1 })
	testmysql.Eventually(t, "they are rotated", func() bool { return w.keys(sale.FlashSale).Generation == 1 })
	if second := w.keys(sale.FlashSale); second.Current != first.Next || !once.Load() {
		t.Errorf("the next ones are current: %t", second.Current == first.Next)
	}
	w.checkout(sale.FlashSale, first.Next.CheckoutToken)
	w.patchKeys(sale.FlashSale, func(secret *corev1.Secret) {
		if secret.Annotations["note"] != "x" {
			t.Error("the other write was lost")
		}
	})
}
