package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
)

const (
	fieldOwner = client.FieldOwner("flashsale-manager")
	// reapplyAfter is how long an unchanged child is left alone; what somebody changed by hand is mended within it.
	reapplyAfter = 30 * time.Second
	// childRetry is how soon a child that failed is tried again.
	childRetry = 5 * time.Second
)

// managedLabel marks the controller's children; its cache holds no others.
var managedLabel = map[string]string{"app.kubernetes.io/managed-by": "flashsale"}

func reserverName(sale *sales.FlashSale) string { return sale.Name + "-reserver" }
func sweeperName(sale *sales.FlashSale) string  { return sale.Name + "-sweeper" }

// child is one object of a sale.
type child struct {
	kind, name string
	empty      func() client.Object
	want       runtime.ApplyConfiguration // nil: it is to go
}

func (s *scope) key(c child) string { return string(s.sale.UID) + "/" + c.kind + "/" + c.name }

// childKinds are what children there may be, beside HTTPRoutes.
var childKinds = map[string]func() client.Object{
	"Deployment":              func() client.Object { return &appsv1.Deployment{} },
	"Service":                 func() client.Object { return &corev1.Service{} },
	"HorizontalPodAutoscaler": func() client.Object { return &autoscalingv2.HorizontalPodAutoscaler{} },
	"PodDisruptionBudget":     func() client.Object { return &policyv1.PodDisruptionBudget{} },
	"NetworkPolicy":           func() client.Object { return &networkingv1.NetworkPolicy{} },
	"Ingress":                 func() client.Object { return &networkingv1.Ingress{} },
}

// Cached says what of each kind the controller's cache is to hold: its own objects. Pods are its own through their
// Deployments. routes says that the cluster has the Gateway API.
func Cached(routes bool) map[client.Object]cache.ByObject {
	own := cache.ByObject{Label: labels.SelectorFromSet(managedLabel)}
	cached := map[client.Object]cache.ByObject{&corev1.Pod{}: own}
	for _, empty := range childKinds {
		cached[empty()] = own
	}
	if routes {
		cached[emptyRoute()] = own
	}
	return cached
}

// children are all objects that the sale may have, those it is to have now with their content.
func (s *scope) children() []child {
	var all []child
	add := func(kind, name string, wanted bool, want func() runtime.ApplyConfiguration) {
		c := child{kind: kind, name: name, empty: childKinds[kind]}
		if kind == routeKind.Kind {
			c.empty = emptyRoute
		}
		if wanted {
			c.want = want()
		}
		all = append(all, c)
	}
	run, reserver, spec := s.decision.Run, reserverName(s.sale), s.sale.Spec.Reserver
	add("Deployment", sweeperName(s.sale), run || s.decision.Publish, s.sweeper)
	add("HorizontalPodAutoscaler", reserver, run && spec.Autoscaling != nil, s.autoscaler)
	add("Deployment", reserver, run, s.reserver)
	add("PodDisruptionBudget", reserver, run, s.disruptionBudget)
	add("NetworkPolicy", reserver, run, s.networkPolicy)
	add("Service", reserver, run, s.service)
	add("Ingress", reserver, run && spec.Ingress != nil, s.ingress)
	if s.HTTPRoutes {
		add(routeKind.Kind, reserver, run && spec.HTTPRoute != nil, s.httpRoute)
	}
	return all
}

// appliedChildren remembers what was applied when, by key.
type appliedChildren struct {
	mu   sync.Mutex
	last map[string]appliedChild
}

type appliedChild struct {
	want string
	at   time.Time
}

// fresh says whether this was applied a moment ago; if not, it counts as applied now.
func (a *appliedChildren) fresh(key, want string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last == nil {
		a.last = map[string]appliedChild{}
	}
	if l := a.last[key]; l.want == want && time.Since(l.at) < reapplyAfter {
		return true
	}
	a.last[key] = appliedChild{want, time.Now()}
	return false
}

func (a *appliedChildren) forget(key string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.last, key)
}

// applyChildren makes the children that are wanted, and takes the others away. What the API server refuses, or somebody
// else owns, becomes a fault of the sale.
func (s *scope) applyChildren(ctx context.Context) {
	var failed error
	if s.decision.Run && s.sale.Spec.Reserver.HTTPRoute != nil && !s.HTTPRoutes {
		failed = errNoGatewayAPI
	}
	failed = errors.Join(failed, s.scale(ctx))
	var keyless error
	if s.decision.Run {
		keyless = s.makeKeys(ctx)
		failed = errors.Join(failed, keyless)
	}
	for _, c := range s.children() {
		if apierrors.IsTooManyRequests(failed) {
			break // it was asked several times, and would be for each child
		}
		if keyless != nil && c.kind == "Deployment" && c.name == reserverName(s.sale) {
			continue // its new pods would have no keys, or what somebody else keeps under that name
		}
		if c.want != nil {
			failed = errors.Join(failed, s.apply(ctx, c))
		} else {
			failed = errors.Join(failed, s.remove(ctx, c))
		}
	}
	if !s.decision.Run && !apierrors.IsTooManyRequests(failed) {
		failed = errors.Join(failed, s.removeKeys(ctx))
	}
	if failed == nil {
		return
	}
	log.FromContext(ctx).V(1).Info("could not bring the children about", "error", failed.Error()) // the condition, when it changes, is logged
	s.seen.ChildFault = childFault(failed)
	wake := s.decision.Wake
	s.decide()
	s.decision.Finish = false // the children go before the object
	if s.decision.Wake = wake; wake == 0 || wake > childRetry {
		s.decision.Wake = childRetry
	}
}

var errNoGatewayAPI = errors.New("the cluster had no Gateway API when the operator started: install it and restart the operator, or remove reserver.httpRoute")

// childFault gives what the API server said of the children as the plan sees it.
func childFault(err error) *plan.Fault {
	f := &plan.Fault{Reason: sales.ReasonApplyFailed, Message: err.Error()}
	var taken *nameTakenError
	var invalid *keysInvalidError
	switch {
	case errors.As(err, &taken):
		f.Reason, f.Person = sales.ReasonNameConflict, true
	case errors.As(err, &invalid):
		f.Reason, f.Person = sales.ReasonKeysInvalid, true
	case errors.Is(err, errNoGatewayAPI), meta.IsNoMatchError(err):
		f.Reason, f.Person = sales.ReasonNoGatewayAPI, true
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), quotaExceeded):
		f.Reason = sales.ReasonQuotaExceeded
	case apierrors.IsTooManyRequests(err):
		f.Reason = sales.ReasonThrottled
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		f.Person = true
	}
	return f
}

type nameTakenError struct{ kind, name string }

func (e *nameTakenError) Error() string {
	return fmt.Sprintf("%s %s exists and belongs to somebody else: rename it, or give the sale another name", e.kind, e.name)
}

func (s *scope) apply(ctx context.Context, c child) error {
	want, err := json.Marshal(c.want)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", c.name, err)
	}
	there := c.empty()
	key := s.key(c)
	name := client.ObjectKey{Namespace: s.sale.Namespace, Name: c.name}
	err = s.Get(ctx, name, there)
	if apierrors.IsNotFound(err) {
		// The cache holds the controller's own objects only: is the name free?
		s.applied.forget(key)
		err = s.Direct.Get(ctx, name, there)
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("looking for %s %s: %w", c.kind, c.name, err)
	}
	if err == nil && !ours(there, s.sale) {
		return &nameTakenError{c.kind, c.name}
	}
	if err == nil && s.database == nil {
		return nil // the Secret cannot be read, so nobody knows its fingerprint: leave the pods as they are
	}
	if s.applied.fresh(key, string(want)) {
		return nil
	}
	if err := s.Apply(ctx, c.want, fieldOwner, client.ForceOwnership); err != nil {
		s.applied.forget(key)
		return fmt.Errorf("applying %s %s: %w", c.kind, c.name, err)
	}
	return nil
}

func (s *scope) remove(ctx context.Context, c child) error {
	there := c.empty()
	err := s.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: c.name}, there)
	if apierrors.IsNotFound(err) {
		s.applied.forget(s.key(c))
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for %s %s: %w", c.kind, c.name, err)
	}
	if !ours(there, s.sale) || !there.GetDeletionTimestamp().IsZero() {
		return nil
	}
	uid := there.GetUID()
	if err := s.Delete(ctx, there, client.PropagationPolicy(metav1.DeletePropagationBackground), client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("removing %s %s: %w", c.kind, c.name, err)
	}
	return nil
}

// Children carry the sale's UID in a label, and no owner reference: a foreground deletion of the object, which Argo CD
// uses, makes the garbage collector delete what the object owns at once, while live holds may still be paid. The finalizer
// takes the children away when they have drained.

// ours says that the object is the sale's own child.
func ours(o client.Object, sale *sales.FlashSale) bool {
	return o.GetLabels()[sales.LabelSaleUID] == string(sale.UID)
}

// saleOfChild names the sale of a child that changed.
func saleOfChild(_ context.Context, o client.Object) []reconcile.Request {
	name := o.GetLabels()["app.kubernetes.io/instance"]
	if name == "" || o.GetLabels()[sales.LabelSaleUID] == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: name}}}
}

// selector finds the pods of this sale, and not those of an earlier one of the same name.
func (s *scope) selector(component string) map[string]string {
	return map[string]string{"app.kubernetes.io/name": "flashsale", "app.kubernetes.io/instance": s.sale.Name,
		"app.kubernetes.io/component": component, sales.LabelSaleUID: string(s.sale.UID)}
}

func (s *scope) labels(component string) map[string]string {
	labels := s.selector(component)
	maps.Copy(labels, managedLabel)
	return labels
}
